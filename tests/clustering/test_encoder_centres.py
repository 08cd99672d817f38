"""Signatures from data: centres of latents, fine-tuned or not, and of PCA."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from flray.client.embedding import EmbedCentres
from flray.clustering.encoder import Encoder, ImageKind
from flray.clustering.encoder_centres import EncoderCentres
from flray.clustering.pca_centres import PcaCentres
from flray.data.datasets.downloaded import FashionMnist
from flray.data.datasets.synthetic import Synthetic
from flray.errors import ClientFailure, ExperimentError
from flray.execution.cluster import connected
from flray.execution.federation import Cohort, Federation
from flray.models.bank import params_of
from flray.models.conv_ae import ConvAe

from scenarios import some_long, tiny_federation

pytestmark = pytest.mark.slow

FINE_TUNE = ["none", "sequential", "independent", "central"]
ENCODER = Encoder(
    Synthetic(num_train=64, num_test=32, size=8, seed=5),
    functools.partial(ConvAe, latent=6),
    epochs=1,
    batch_size=16,
    lr=1e-2,
)
MODULE = ENCODER.module(ImageKind((1, 8, 8), 10))
NUM_FLOATS = sum(leaf.numel() for leaf in params_of(MODULE).values())


@pytest.fixture(autouse=True, scope="module")
def _one_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLRAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def federation(*overrides: str) -> Federation:
    """Six ragged clients, one with few examples."""
    fewer = ["dataset.num_train=120", "dataset.num_test=40", "split.alpha=0.1"]
    return tiny_federation(*fewer, *overrides)


def ask(fed: Federation, signature, memory=None, clients=None):
    everybody = fed.clients if clients is None else np.array(clients)
    return signature(fed, fed.initial_bank(), Cohort(1, everybody), memory or {})


@pytest.mark.parametrize("fine_tune", FINE_TUNE)
def test_points_are_k_centres_of_each_client_in_order(fine_tune) -> None:
    fed = federation()
    points, memory = ask(fed, EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=2))
    assert points.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert points.owner.tolist() == np.repeat(np.arange(6), 3).tolist()
    assert points.values.shape == (18, 6)
    again, _ = ask(federation(), EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=2))
    assert torch.equal(points.values, again.values)
    changed = any(not torch.equal(memory[n], v) for n, v in ENCODER.load_or_train("cpu").items())
    assert changed == (fine_tune in ("sequential", "central"))


@pytest.mark.parametrize("fine_tune", some_long(FINE_TUNE, ["sequential", "independent"]))
def test_blocks_do_not_change_a_bit(fine_tune) -> None:
    signature = EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=1)
    one, three = (ask(federation(f"execution.block={b}"), signature) for b in (1, 3))
    assert torch.equal(one[0].values, three[0].values)
    assert all(torch.equal(one[1][name], three[1][name]) for name in one[1])


def test_without_fine_tuning_centres_are_those_of_the_encoder_as_it_is() -> None:
    fed = federation()
    points, _ = ask(fed, EncoderCentres(ENCODER, k=3, fine_tune="none"))
    task = EmbedCentres(MODULE, "unit", 1, dict.fromkeys(range(6), 3))
    expected = fed.map(task, Cohort(1, fed.clients), ENCODER.load_or_train("cpu"))
    np.testing.assert_array_equal(points.values.numpy(), np.concatenate(list(expected.values())))


def test_the_order_of_the_chain_comes_from_the_seed_and_the_round() -> None:
    signature = EncoderCentres(ENCODER, k=3, epochs=1)
    split = "split={name: iid, clients: 4}"  # the same data for both
    first, other = federation(split), replace(federation(split), seed=3)
    assert first.generator("fine-tune order", 1).permutation(4).tolist() != (
        other.generator("fine-tune order", 1).permutation(4).tolist()
    )
    a, b = ask(first, signature)[0], ask(other, signature)[0]
    assert not torch.equal(a.values, b.values)


def test_alone_in_turn_and_independent_are_the_same() -> None:
    sequential, independent = (
        ask(federation(), EncoderCentres(ENCODER, k=3, fine_tune=how, epochs=2), clients=[4])[0]
        for how in ("sequential", "independent")
    )
    assert torch.equal(sequential.values, independent.values)


@pytest.mark.parametrize("fine_tune", some_long(FINE_TUNE, ["sequential", "central"]))
def test_a_later_call_goes_on_from_memory(fine_tune, monkeypatch) -> None:
    fed, signature = federation(), EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=1)
    first, memory = ask(fed, signature)
    kept = {name: leaf.clone() for name, leaf in memory.items()}
    monkeypatch.setattr(Encoder, "load_or_train", pytest.fail)
    second, _ = ask(fed, signature, memory)
    assert all(torch.equal(memory[name], kept[name]) for name in kept)
    same = torch.equal(first.values, second.values)
    assert same == (fine_tune in ("none", "independent"))


def test_bytes_are_those_of_table_vi() -> None:
    """Down M W_enc, and the decoder to who trains; up k M e. 4 bytes a number."""
    encoder = sum(p.numel() for p in MODULE.encoder.parameters())
    for fine_tune, down in (("none", encoder), ("independent", NUM_FLOATS)):
        fed = federation()
        ask(fed, EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=1))
        assert fed.meter.counts["bytes_down_signature"] == 4 * 6 * down
        assert fed.meter.counts["bytes_up_signature"] == 4 * 6 * 3 * 6
        assert fed.meter.counts["bytes_up_fine_tuning"] == 0


def test_what_fine_tuning_sends_beside_is_counted() -> None:
    """In turn: five times the encoder and two moments, a step (4 bytes) and an epoch (8)."""
    fed = federation()
    ask(fed, EncoderCentres(ENCODER, k=3, fine_tune="sequential", epochs=1))
    assert fed.meter.counts["bytes_up_fine_tuning"] == 5 * (3 * 4 * NUM_FLOATS + 12)
    assert fed.meter.counts["bytes_down_fine_tuning"] == 5 * (2 * 4 * NUM_FLOATS + 12)
    fed = federation()
    ask(fed, EncoderCentres(ENCODER, k=3, fine_tune="central", epochs=1))
    sent = fed.num_examples.sum() * (8 * 8 + 8)  # pixels, and a label of 8 bytes
    assert fed.meter.counts["bytes_up_fine_tuning"] == sent
    assert fed.meter.counts["bytes_down_fine_tuning"] == 0


@pytest.mark.parametrize(
    ("fine_tune", "counted"),
    [("none", False), ("sequential", True), ("independent", True), ("central", False)],
)
def test_steps_of_fine_tuning_are_the_clients_own(fine_tune, counted) -> None:
    """epochs * ceil(n / batch) a client; central fine-tuning happens at the server."""
    fed = federation()
    ask(fed, EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=3))
    expected = sum(3 * -(-int(n) // 16) for n in fed.num_examples) if counted else 0
    assert fed.meter.counts["client_steps"] == expected
    assert fed.meter.counts["client_steps_fine_tuning"] == expected


def test_as_many_centres_as_labels_is_ground_truth() -> None:
    signature = EncoderCentres(ENCODER, k="label_count", fine_tune="none")
    with pytest.raises(ExperimentError, match="uses_ground_truth: true"):
        ask(federation(), signature)
    fed = federation("uses_ground_truth=true")
    points, _ = ask(fed, signature)
    labels = fed.oracle.split.labels
    expected = [len(np.unique(labels[fed.oracle.split.train[i]])) for i in range(6)]
    assert np.bincount(points.owner).tolist() == expected
    assert len(set(expected)) > 1


class Stubborn(ConvAe):
    """Cannot stand more than 20 images at a time."""

    def encode(self, x):
        if len(x) > 20:
            raise ArithmeticError("too many")
        return super().encode(x)


@pytest.mark.parametrize("fine_tune", ["none", "sequential", "independent"])
def test_a_client_that_fails_is_named_or_left_out(fine_tune) -> None:
    encoder = replace(ENCODER, model=functools.partial(Stubborn, latent=6))
    encoder = replace(encoder, dataset=replace(encoder.dataset, num_test=40))
    signature = EncoderCentres(encoder, k=3, fine_tune=fine_tune, epochs=1)
    large = np.flatnonzero(federation().num_examples > 20)
    assert 0 < len(large) < 6
    one_of_them = "|".join(map(str, large))  # in turn: the first to be met
    with pytest.raises(ClientFailure, match=rf"client ({one_of_them}) failed: ArithmeticError"):
        ask(federation(), signature)
    fed = federation("on_client_failure=drop")
    points, _ = ask(fed, signature)
    assert points.clients.tolist() == np.setdiff1d(np.arange(6), large).tolist()
    assert fed.meter.counts["clients_dropped"] == len(large)
    batches = -(-fed.num_examples[points.clients] // 16).sum()  # of those who answered
    assert fed.meter.counts["client_steps"] == (0 if fine_tune == "none" else batches)
    nobody, _ = ask(federation("on_client_failure=drop"), signature, clients=large)
    assert len(nobody.clients) == 0


def test_pca_centres() -> None:
    fed = federation()
    points, memory = ask(fed, PcaCentres(components=64, k=2))
    assert points.values.shape == (12, 64)
    assert memory == {}
    assert fed.meter.counts["bytes_up_signature"] == 4 * 6 * 2 * 64
    assert fed.meter.counts["bytes_down_signature"] == 0


@pytest.mark.parametrize(
    "signature",
    [
        PcaCentres(components=8, k=1),
        EncoderCentres(ENCODER, k=1, fine_tune="none"),
        EncoderCentres(ENCODER, k=1, fine_tune="sequential", epochs=1),
    ],
)
def test_clients_made_up_for_a_measure_are_described_too(signature) -> None:
    """The first of two that resemble client 0 has id 6."""
    fed = federation("evaluate.robustness={draws: 2}")
    points, _ = ask(fed, signature, clients=[0, 6])
    assert points.clients.tolist() == [0, 6]
    assert not torch.equal(points.values[0], points.values[1])


def test_defaults_are_flts() -> None:
    signature = EncoderCentres()
    assert signature.encoder == Encoder(FashionMnist(), ConvAe, 40, 64, 1e-3, 10, "unit")
    assert (signature.k, signature.fine_tune, signature.epochs) == (5, "sequential", 5)
    assert PcaCentres() == PcaCentres(components=128, k=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"k": 0}, "k must be >= 1, got 0"), ({"epochs": 0}, "epochs must be >= 1, got 0; fine_tune")],
)
def test_what_cannot_be_is_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderCentres(**wrong)
    with pytest.raises(ValueError, match="components must be >= 1, got 0"):
        PcaCentres(components=0)


@pytest.mark.long
def test_on_actors_as_in_process() -> None:
    """Encoder, carried state and centres go through memory that processes share."""
    pool = ["execution.executor=ray", "execution.actors={count: 2, num_cpus: 0.1}"]
    block = "execution.block=2"
    signatures = [EncoderCentres(ENCODER, k=3, fine_tune=how, epochs=2) for how in FINE_TUNE]
    signatures.append(PcaCentres(components=16, k=2))
    alone = federation(block)
    with connected():
        spread = federation(block, *pool)
        for signature in signatures:
            (a, kept), (b, carried) = ask(alone, signature), ask(spread, signature)
            assert torch.equal(a.values, b.values)
            assert kept.keys() == carried.keys()
            assert all(torch.equal(kept[name], carried[name]) for name in kept)
        spread.executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fine_tune", FINE_TUNE)
def test_on_a_gpu_as_on_a_cpu(fine_tune) -> None:
    """The same bits every time, and close to a CPU's; in float64, for k-means may jump."""
    signature = EncoderCentres(ENCODER, k=3, fine_tune=fine_tune, epochs=2)
    double = "execution.precision=float64"
    once, again = (ask(federation(double, "execution.device=cuda"), signature) for _ in range(2))
    alone = ask(federation(double, "execution.device=cpu"), signature)
    assert torch.equal(once[0].values, again[0].values)
    torch.testing.assert_close(once[0].values, alone[0].values, atol=1e-4, rtol=0)
    for name, leaf in once[1].items():
        assert leaf.device.type == "cpu"
        torch.testing.assert_close(leaf, alone[1][name], atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pre_training_on_a_gpu_repeats_and_is_close_to_a_cpu() -> None:
    once, again, alone = (ENCODER.train(device) for device in ("cuda", "cuda", "cpu"))
    for name, leaf in once.items():
        assert torch.equal(leaf, again[name])
        torch.testing.assert_close(leaf, alone[name], atol=1e-4, rtol=0)
