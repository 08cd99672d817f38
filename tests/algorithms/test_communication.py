"""Bytes by kind: the papers' closed formulas, and the costs that FLIS prints."""

import pytest
import yaml

from flray.reports.published.tables import FOLDER

M, RHO, T, FLOAT = 6, 0.5, 4, 4  # clients, participation and rounds of the tiny run; bytes
W_LOCAL = 64 * 16 + 16 + 16 * 10 + 10  # mlp200 of 16 hidden units on 8x8 images
ENCODER = (
    "{dataset: {name: synthetic, num_train: 60, num_test: 20, size: 8}, model: conv_ae, epochs: 1}"
)


def moved(result, kind: str) -> float:
    """Bytes of one kind, both ways, over all rounds."""
    columns = [f"bytes_{way}_{kind}" for way in ("up", "down")]
    return float(sum(result.rounds[c].sum() for c in columns if c in result.rounds))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("fine_tune", ["none", "sequential"])
def test_flt_moves_what_its_table_says(tiny_run, fine_tune) -> None:
    """FLT, Table VI: M W_enc + k M e + 2 ρ M W_local T; fine-tuning is a kind of its own.

    The decoder travels with the encoder where clients fine-tune both.
    """
    k = 2
    signature = f"{{encoder: {ENCODER}, k: {k}, fine_tune: {fine_tune}, epochs: 1}}"
    # The server embeds what it has: nothing moves, and UMAP would be compiled.
    clustering = f"{{signature: {signature}, embed: none}}"
    result = tiny_run(f"algorithm={{name: flt, clustering: {clustering}}}")
    encoder, decoder = conv_ae_sizes()
    e = 128
    w_enc = encoder if fine_tune == "none" else encoder + decoder
    assert moved(result, "signature") == FLOAT * (M * w_enc + k * M * e)
    assert moved(result, "model") == FLOAT * 2 * RHO * M * W_LOCAL * T
    assert (moved(result, "fine_tuning") > 0) == (fine_tune == "sequential")
    assert result.rounds["cohort_size"].tolist() == [RHO * M] * T


def conv_ae_sizes() -> tuple[int, int]:
    """Parameters of encoder and decoder for 8x8 images: two 3x3 convolutions, a latent of 128."""
    flat = 4 * 2 * 2  # four channels, pooled twice
    encoder = (9 * 16 + 16) + (9 * 16 * 4 + 4) + (flat * 128 + 128)
    decoder = (128 * flat + flat) + (4 * 16 * 4 + 16) + (16 * 4 + 1)
    return encoder, decoder


def test_fedsem_moves_what_its_table_says(tiny_run) -> None:
    """FLT, Table VI: 2 ρ M W_local T"""
    result = tiny_run("algorithm={name: fedsem, number: 2}")
    assert moved(result, "model") == FLOAT * 2 * RHO * M * W_LOCAL * T


LENET5, LENET5_LAST_TWO = 62_006, 11_014  # parameters, of three channels; its last two layers
FLIS = {
    "FedAvg": ("fedavg", LENET5),
    "FedProx": ("fedprox", LENET5),
    "LG": ("{name: lg_fedavg, global_layers: 2}", LENET5_LAST_TWO),
    "IFCA": ("{name: ifca, number: 2}", LENET5),
    "FLIS (HC)": ("flis_hc", LENET5),  # its clustering pass is not in the printed costs
}


@pytest.mark.parametrize("method", FLIS)
def test_the_costs_that_flis_prints(tiny_run, method) -> None:
    """FLIS, Table III: Mb per client = rounds x participation x models moved x parameters x 32.

    How many models a client of the cohort moves is counted in a tiny run, in which LG-FedAvg's last
    two layers are all there are.
    """
    algorithm, params = FLIS[method]
    result = tiny_run(f"algorithm={algorithm}", "split.server=30")
    models_moved = moved(result, "model") / (FLOAT * RHO * M * W_LOCAL * T)
    published = yaml.safe_load((FOLDER / "flis_table3.yaml").read_text())
    (row,) = (row for row in published["rows"] if row["method"] == method)
    cells = [cell for name, cell in row["values"].items() if name != "CIFAR-100"]
    printed = [(c["cost_mb_skew30"], c["derived_rounds_skew30"]) for c in cells if c["reached"]]
    assert printed
    for cost, rounds in printed:
        assert rounds * 0.1 * models_moved * params * 32 / 1e6 == pytest.approx(cost, rel=0.007)
