"""One way to drive a run, in the order in which it happens.

- prepare (`preparing.py`): load and split the data, build the module, plan the memory, once;
- assemble (`assemble.py`): from these to a `Server` in its run directory;
- conduct (`conduct.py`): lock, tracker and ways to stop, around the rounds of every run;
- launch: where a run is conducted. `launch.py`: in this process, or with this process as the driver
  of a server actor; `together.py`: several side by side in forks; `keeper.py` and `watching.py`: in
  a process that outlives the terminal. A trial of a sweep conducts its own.

`rehearsal.py` and `remarks.py` tell beforehand what a run would refuse or ignore.
"""
