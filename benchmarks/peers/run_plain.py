"""A plain PyTorch loop over clients, in one process or in several that share the cohort.

python benchmarks/peers/run_plain.py FOLDER SYSTEM [PROCESSES]
"""

import sys

import torch
import torch.multiprocessing as mp
from work import Report, Work


def add_trained(work, net, start, t, clients, total):
    """Train the clients from `start` and add their weights to `total`."""
    for client in clients:
        net.load_state_dict(start)
        work.train(net, t, int(client))
        for name, leaf in net.state_dict().items():
            total[name] += leaf


def run_worker(folder, rank, num, start, total, begin, end):
    torch.set_num_threads(1)
    work = Work(folder)
    work.load_data()
    net = work.new_net()
    for t in range(work.num_rounds):
        begin.wait()
        for leaf in total.values():
            leaf.zero_()
        add_trained(work, net, start, t, work.cohorts[t][rank::num], total)
        end.wait()


def main() -> None:
    folder, system = sys.argv[1:3]
    num = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.set_num_threads(1)
    work = Work(folder)
    report = Report(system, work)
    start = {name: leaf.clone() for name, leaf in work.new_net().state_dict().items()}
    if num == 1:
        work.load_data()
        net = work.new_net()
        report.start()
        for t in range(work.num_rounds):
            total = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
            add_trained(work, net, start, t, work.cohorts[t], total)
            start = {name: leaf / work.num_heard for name, leaf in total.items()}
            report.round_done()
        report.finish(start)
        return
    context = mp.get_context("spawn")
    start = {name: leaf.share_memory_() for name, leaf in start.items()}
    totals = [
        {n: torch.zeros_like(v).share_memory_() for n, v in start.items()} for _ in range(num)
    ]
    begin, end = context.Barrier(num + 1), context.Barrier(num + 1)
    for rank in range(num):
        arguments = (folder, rank, num, start, totals[rank], begin, end)
        context.Process(target=run_worker, args=arguments, daemon=True).start()
    report.start()
    for _ in range(work.num_rounds):
        begin.wait()
        end.wait()
        for name, leaf in start.items():
            leaf.copy_(sum(total[name] for total in totals) / work.num_heard)
        report.round_done()
    report.finish(start)


if __name__ == "__main__":
    main()
