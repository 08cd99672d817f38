"""What a client tells of its data, against the same thing written out by hand."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from flray.client.embedding import (
    EmbedCentres,
    FineTuneCentres,
    FineTuneInTurn,
    ProjectCentres,
    SendData,
    k_means,
)
from flray.client.encoder_training import EncoderTraining
from flray.client.host import Host
from flray.client.tasks import ClientsJob
from flray.data.dataset import Normalization
from flray.data.pixels import tensor_over
from flray.models.bank import build_seeded, load_params, params_of
from flray.models.conv_ae import ConvAe
from flray.models.mlp200 import Mlp200
from flray.models.residual_conv_ae import ResidualConvAe
from flray.models.supervised_ae import SupervisedAe

from scenarios import host_over, noise_dataset, ragged_split

pytestmark = pytest.mark.slow

SHAPE = (1, 8, 8)
SIZES = (1, 3, 9, 40, 40)
K = 4
TRAINING = EncoderTraining(epochs=2, batch_size=16, lr=1e-2, halve_every=3)


def start(dtype: torch.dtype = torch.float32, mean: float = 0.1) -> Host:
    """Ragged clients; the last two hold the same images."""
    split = ragged_split(SIZES)
    split.image_ids[-40:] = split.image_ids[-80:-40]
    dataset = noise_dataset(sum(SIZES), SHAPE)
    dataset = replace(dataset, normalization=Normalization((mean,), (0.5,)))
    return host_over(Mlp200(SHAPE, num_classes=10, hidden=4), dataset, split, dtype=dtype)


@pytest.fixture(scope="module")
def host() -> Host:
    return start()


@pytest.fixture(scope="module")
def module() -> ConvAe:
    return build_seeded(lambda: ConvAe(SHAPE, latent=6), seed=3)


def embed(module, pixels="unit") -> EmbedCentres:
    return EmbedCentres(module, pixels, t=1, num_centres=dict.fromkeys(range(5), K))


def job(*clients: int) -> ClientsJob:
    return ClientsJob(np.array(clients))


def images(host: Host, client: int) -> torch.Tensor:
    ids = host.timeline.at(1).train[client]
    return host.examples.images[host.examples.image_ids[torch.from_numpy(ids)]].float() / 255


def by_hand(model, x: torch.Tensor, optimizer, scheduler) -> np.ndarray:
    """TRAINING on one client with torch's own parts, then its centres."""
    model.train()
    for _ in range(2):
        for batch in x.split(16):
            optimizer.zero_grad()
            (model(batch) - batch).square().flatten(1).mean(1).mean().backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        latents = model.encode(x).numpy()
    return KMeans(K, random_state=43, n_init=10).fit(latents).cluster_centers_


def optimizer_of(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


@pytest.mark.parametrize("pixels", ["unit", "signed"])
def test_centres_are_k_means_of_the_latents(host, module, pixels) -> None:
    (found,) = embed(module, pixels)(host, params_of(module), job(3))
    x = images(host, 3) if pixels == "unit" else images(host, 3) * 2 - 1
    latents = module.encode(x).detach().numpy()
    expected = KMeans(K, random_state=43, n_init=10).fit(latents).cluster_centers_
    assert found.shape == (K, 6)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_latents_are_taken_in_evaluation_mode(host) -> None:
    """Fine-tuning moves the statistics of batch norm; in training mode a batch has its own."""
    model = build_seeded(lambda: ResidualConvAe(SHAPE, latent=6), seed=1)
    (found,), carried = FineTuneInTurn(embed(model), TRAINING)(host, params_of(model), job(3))
    load_params(model, carried)
    with torch.no_grad():  # training mode last, for it moves the statistics
        calm, lively = (model.train(mode).encode(images(host, 3)).numpy() for mode in (False, True))
    assert np.abs(lively - calm).max() > 1e-2
    np.testing.assert_allclose(found, k_means(calm, K), atol=1e-4)


def test_statistics_of_images_are_those_of_training_mode_one_image_at_a_time(host) -> None:
    """As FLT's code embeds; the encoder that the next client goes on from does not change."""
    model = build_seeded(lambda: ResidualConvAe(SHAPE, latent=6), seed=1)
    task = replace(embed(model), statistics="image")
    (running,) = embed(model)(host, params_of(model), job(3))
    (found,) = task(host, params_of(model), job(3))
    x = images(host, 3)
    with torch.no_grad():
        latents = torch.cat([model.train().encode(image[None]) for image in x]).numpy()
    assert np.abs(found - running).max() > 1e-2
    np.testing.assert_allclose(found, k_means(latents, K), atol=1e-4)
    carried = [
        FineTuneInTurn(e, TRAINING)(host, params_of(model), job(3))[1] for e in (embed(model), task)
    ]
    assert all(torch.equal(leaf, carried[1][name]) for name, leaf in carried[0].items())


def test_the_datasets_normalisation_does_not_matter(host, module) -> None:
    other = start(mean=0.4)
    assert not torch.equal(other.examples.mean, host.examples.mean)
    a, b = (embed(module)(each, params_of(module), job(3))[0] for each in (host, other))
    assert np.array_equal(a, b)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("client", [0, 1])
def test_a_client_with_fewer_examples_than_k_still_sends_k(host, module, client) -> None:
    """One example: its latent k times. Three and k = 4: each of them, one twice."""
    (found,) = embed(module)(host, params_of(module), job(client))
    latents = module.encode(images(host, client)).detach().numpy()
    assert found.shape == (K, 6)
    gaps = np.abs(found[:, None] - latents[None]).max(-1)  # (K, n)
    assert gaps.min(1).max() < 1e-6
    assert gaps.min(0).max() < 1e-6


def test_clients_with_the_same_data_give_the_same_centres(host, module) -> None:
    for task in (embed(module), FineTuneCentres(embed(module), TRAINING)):
        other, a, b = task(host, params_of(module), job(2, 3, 4))
        assert np.array_equal(a, b)
        assert not np.array_equal(a, other)


def test_k_means_gives_the_same_bits_whatever_the_threads() -> None:
    rows = np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float32)
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            found.append(k_means(rows, 5))
    assert np.array_equal(*found)


def test_independent_fine_tuning_is_training_that_client_alone(host, module) -> None:
    before = copy.deepcopy(params_of(module))
    found = FineTuneCentres(embed(module), TRAINING)(host, params_of(module), job(2, 3))
    for client, centres in zip((2, 3), found, strict=True):
        model = copy.deepcopy(module)
        np.testing.assert_allclose(
            centres, by_hand(model, images(host, client), *optimizer_of(model)), atol=1e-5
        )
    (untuned,) = embed(module)(host, params_of(module), job(3))
    assert np.abs(found[1] - untuned).max() > 1e-2
    after = params_of(module)
    assert all(torch.equal(before[name], after[name]) for name in before)  # what came stays


def test_in_turn_adam_and_its_schedule_go_from_client_to_client(host, module) -> None:
    """Four epochs in all: the rate halves after the first epoch of the second client."""
    task = FineTuneInTurn(embed(module), TRAINING)
    found, carried = task(host, params_of(module), job(3, 2))
    model = copy.deepcopy(module)
    parts = optimizer_of(model)
    for client, centres in zip((3, 2), found, strict=True):
        np.testing.assert_allclose(centres, by_hand(model, images(host, client), *parts), atol=1e-5)
    for name, leaf in params_of(model).items():
        torch.testing.assert_close(carried[name], leaf, atol=1e-5, rtol=0)
    assert int(carried["adam/epoch"]) == 4
    fresh = FineTuneCentres(embed(module), TRAINING)
    one = task(host, params_of(module), job(3))[1]
    forgetful = fresh(host, {name: one[name] for name in params_of(module)}, job(2))[0]
    assert np.abs(forgetful - found[1]).max() > 1e-3  # as if Adam started anew


@pytest.mark.parametrize(
    "make", [ConvAe, SupervisedAe, pytest.param(ResidualConvAe, marks=pytest.mark.long)]
)
def test_a_chain_cut_into_jobs_gives_the_same_bits(host, make) -> None:
    """BatchNorm statistics and labels included; a client of one example in the middle."""
    needs = {"num_classes": 10} if make is SupervisedAe else {}
    model = build_seeded(lambda: make(SHAPE, latent=6, **needs), seed=1)
    task = FineTuneInTurn(embed(model), TRAINING)
    whole, last = task(host, params_of(model), job(3, 0, 2, 1))
    carried, parts = params_of(model), []
    for clients in ((3,), (0, 2), (1,)):
        centres, carried = task(host, carried, job(*clients))
        parts += centres
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert last.keys() == carried.keys()
    assert all(torch.equal(last[name], carried[name]) for name in last)


def test_order_matters_in_turn(host, module) -> None:
    task = FineTuneInTurn(embed(module), TRAINING)
    forward, _ = task(host, params_of(module), job(2, 3))
    backward, _ = task(host, params_of(module), job(3, 2))
    assert np.abs(forward[0] - backward[1]).max() > 1e-3
    assert np.abs(forward[1] - backward[0]).max() > 1e-3


def test_nothing_received_is_written_to(host, module) -> None:
    """Carried params lie in memory that processes share: here it cannot be written at all."""
    task = FineTuneInTurn(embed(module), TRAINING)
    _, carried = task(host, params_of(module), job(3))
    frozen = {name: _read_only(leaf) for name, leaf in carried.items()}
    copies = {name: leaf.clone() for name, leaf in frozen.items()}
    task(host, frozen, job(2))
    assert all(torch.equal(frozen[name], copies[name]) for name in frozen)
    assert len(frozen) > 3 * len(params_of(module))  # params, two moments each, step and epoch


def _read_only(leaf: torch.Tensor) -> torch.Tensor:
    array = leaf.numpy().copy()
    array.setflags(write=False)
    return tensor_over(array)


def test_centres_have_the_precision_of_the_host(module) -> None:
    double = start(torch.float64)
    (found,) = FineTuneCentres(embed(module), TRAINING)(double, params_of(module), job(3))
    assert found.dtype == np.float64


@pytest.mark.filterwarnings("error")
def test_pca_repeats_examples_until_it_has_enough(host) -> None:
    """9 examples and 12 components: examples 0, 1 and 2 count twice. One example: all zero.

    Pixels are normalised, here by a mean of 0.1 and a standard deviation of 0.5.
    """
    found, one = ProjectCentres(components=12, k=3, t=1)(host, {}, job(2, 0))
    pixels = ((images(host, 2) - 0.1) / 0.5).flatten(1).numpy()
    latents = PCA(12, random_state=43).fit_transform(np.concatenate([pixels, pixels[:3]]))
    expected = KMeans(3, random_state=43, n_init=10).fit(latents).cluster_centers_
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(one, np.zeros((3, 12)), atol=1e-6)


def test_what_a_client_sends_for_central_training_is_its_own_data(host) -> None:
    (sent,) = SendData(t=1)(host, {}, job(2))
    assert sent.images.dtype == np.uint8
    np.testing.assert_array_equal(sent.images / np.float32(255), images(host, 2).numpy())
    assert sent.labels.tolist() == [k % 10 for k in range(4, 13)]
