"""Sweeps: many configurations of experiments, of which nothing is trained twice.

A *row* is one configuration with one seed, and one line of the sweep's table. A *trial* is the
process of Ray Tune that runs a row. A *prefix* is FedAvg's rounds before a clustering, from which
rows *branch*. An *entry* of the *cache* is a result that rows share.

 file | job |
---|---|
 `space`, `forms` | read a space: experiments, the keys that vary and their values |
 `rows` | the configurations of a space |
 `search`, `tuning`, `allotment` | Ray Tune: which row next, trials and their resources |
 `trial`, `process` | run one row; what rows of one process share |
 `branching`, `stages`, `groups` | what rows share: FedAvg's rounds, clusterings, clusters |
 `cache`, `keys` | where it is kept, and by which key |
 `folder`, `table`, `ranking`, `importance` | files, table, best configuration, what keys explain |
 `driver`, `describing` | run a sweep; say what one will run |
"""
