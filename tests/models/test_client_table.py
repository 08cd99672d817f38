"""Client tables: laws against a plain dictionary, and what updates and checkpoints cost."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flray.models.client_table import MOST_STORED, ClientTable
from flray.records.checkpoint import CheckpointStore

NUM_CLIENTS = 9


def empty() -> ClientTable:
    return ClientTable.empty({"c": torch.full((1, 2), -1.0)}, NUM_CLIENTS)


cohorts = st.lists(st.sets(st.integers(0, NUM_CLIENTS - 1), max_size=5), max_size=25)


@given(cohorts)
def test_a_table_is_a_dictionary_of_rows(cohorts) -> None:
    table, expected = empty(), {}
    for t, cohort in enumerate(cohorts):
        clients = np.array(sorted(cohort), dtype=np.int64)
        rows = torch.tensor([[float(t), float(i)] for i in clients]).reshape(-1, 2)
        before = table.of_clients(np.arange(NUM_CLIENTS))["c"]
        updated = table.updated(clients, {"c": rows})
        assert torch.equal(table.of_clients(np.arange(NUM_CLIENTS))["c"], before)  # untouched
        table = updated
        expected |= {int(i): row for i, row in zip(clients, rows, strict=True)}
    order = np.random.default_rng(0).permutation(NUM_CLIENTS)
    default = torch.tensor([-1.0, -1.0])
    wanted = torch.stack([expected.get(int(i), default) for i in order])
    assert torch.equal(table.of_clients(order)["c"], wanted)
    assert table.clients.tolist() == sorted(expected)
    stored = sum(len(block["c"]) for block in table.blocks.values())
    assert stored <= MOST_STORED * max(len(expected), 1)


def test_a_bank_of_a_table_has_the_default_once() -> None:
    table = empty().updated(np.array([2, 5]), {"c": torch.tensor([[2.0, 2.0], [5.0, 5.0]])})
    bank = table.bank(np.arange(NUM_CLIENTS))
    assert bank.params["c"][:, 0].tolist() == [-1.0, 2.0, 5.0]
    assert bank.owner.tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 0]
    of_two = table.bank(np.array([2, 5]))
    assert of_two.params["c"][:, 0].tolist() == [2.0, 5.0]
    assert of_two.owner[[2, 5]].tolist() == [0, 1]


def test_a_checkpoint_writes_the_rows_of_an_update_and_no_others(tmp_path) -> None:
    """100 clients of 4,000 bytes each; every round updates two of them."""
    table = ClientTable.empty({"c": torch.zeros(1, 1000)}, 100)
    store = CheckpointStore(tmp_path)
    every = np.arange(100)
    table = table.updated(every, {"c": torch.ones(100, 1000)})
    store.save(0, table)
    sizes = []
    for t in range(1, 7):
        table = table.updated(np.array([t, 50 + t]), {"c": torch.full((2, 1000), float(t))})
        store.save(t, table)
        sizes.append((tmp_path / f"round_{t:06d}.safetensors").stat().st_size)
    assert max(sizes) < 2 * 8000
    loaded = CheckpointStore(tmp_path).load_latest()
    assert torch.equal(loaded.state.of_clients(every)["c"], table.of_clients(every)["c"])
