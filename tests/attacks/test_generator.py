"""The generator: what it learns, how it decodes, and what its file says and refuses."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedveil.attacks.generator import (
    GeneratorSettings,
    as_pixels,
    batches_of,
    decoded,
    decoder_of,
    evenly_spread,
    shapes_of,
    sizes_of,
    trained,
    training_seconds,
)
from fedveil.attacks.prior_file import FORMAT, VERSION, Prior, PriorHeader, prior_at
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.examples import ArrayExamples
from fedveil.tensorfile import write_tensors

from .small import task_of

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 14), (2, 64, 64)]


def streams(seed=0):
    return Streams.seeded(seed, [0], "test")


@cache
def digits(count=600):
    made = task_of("lenet")
    inputs, labels = made.train.batch(range(count))
    return as_pixels(inputs, made.normalization.box()), labels


@cache
def learned(epochs=30, latents=16, seed=0):
    return trained(*digits(), 10, GeneratorSettings(latents=latents, epochs=epochs), streams(seed))


@cache
def small_prior():
    made = task_of("lenet")
    settings = GeneratorSettings(latents=4, epochs=2, most=100)
    return Prior.train(made.train, "digits", normalization=made.normalization, settings=settings, classes=10)


def mean_picture_decibels():
    pictures = digits()[0]
    return -10 * (pictures - pictures.mean(0)).square().mean().log10().item()


# ---- decoding ------------------------------------------------------------------------------------------------


def as_module(weights, shape):
    """The same decoder out of torch's own layers."""
    sizes = sizes_of(shape)
    linear = nn.Linear(*reversed(weights["decoder.linear.weight"].shape))
    layers = [linear, nn.ReLU(), nn.Unflatten(1, (-1, *sizes[-1]))]
    ups = []
    for step, (height, width) in enumerate(reversed(sizes[:-1])):
        kernel = weights[f"decoder.up{step}.weight"]
        coarse, fine = sizes[len(sizes) - 1 - step], (height, width)
        odd = tuple(2 * side - other for side, other in zip(coarse, fine, strict=True))
        layer = nn.ConvTranspose2d(*kernel.shape[:2], 4, stride=2, padding=1)
        ups.append(layer)
        layers += [
            layer,
            nn.ZeroPad2d((0, -odd[1], 0, -odd[0])),
            nn.ReLU() if len(ups) < len(sizes) - 1 else nn.Sigmoid(),
        ]
    names = ["decoder.linear", *(f"decoder.up{step}" for step in range(len(ups)))]
    for layer, name in zip((linear, *ups), names, strict=True):
        layer.double().load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
    return nn.Sequential(*layers)


def random_weights(shape, latents=5, classes=3):
    own = streams(1)
    return {
        name: 0.3 * own.fold(name).normal(*size)[0].double()
        for name, size in shapes_of(shape, latents, classes).items()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_equals_a_plain_module_alone_and_stacked(shape):
    weights = random_weights(shape)
    codes = streams(2).normal(3, 2, 5)[0].double()
    whole = as_module(weights, shape)(codes.flatten(0, 1)).reshape(3, 2, *shape)
    assert ((whole >= 0) & (whole <= 1)).all()
    torch.testing.assert_close(torch.stack([decoded(weights, each, shape) for each in codes]), whole)
    torch.testing.assert_close(vmap(lambda each: decoded(weights, each, shape))(codes), whole)
    copies = {name: tensor.expand(3, *tensor.shape) for name, tensor in decoder_of(weights).items()}
    torch.testing.assert_close(vmap(lambda own, each: decoded(own, each, shape))(copies, codes), whole)


def test_gradients_pass_through_a_stack():
    shape, weights = (1, 8, 8), random_weights((1, 8, 8))
    codes = streams(2).normal(3, 2, 5)[0].double()
    stacked = vmap(grad(lambda each: decoded(weights, each, shape).square().sum()))(codes)
    live = codes.clone().requires_grad_()
    as_module(weights, shape)(live.flatten(0, 1)).square().sum().backward()
    torch.testing.assert_close(stacked, live.grad)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(8, 200), st.integers(8, 200))
def test_any_picture_has_a_decoder_of_its_size(channels, height, width):
    sizes = sizes_of((channels, height, width))
    assert sizes[0] == (height, width)
    assert 4 <= min(sizes[-1]) <= 7
    for fine, coarse in pairwise(sizes):
        assert all(2 * c - f in (0, 1) for c, f in zip(coarse, fine, strict=True))
    shapes = shapes_of((channels, height, width), 7, 2)
    assert shapes[f"decoder.up{len(sizes) - 2}.bias"] == (channels,)


# ---- training ------------------------------------------------------------------------------------------------


def test_training_lowers_the_error_on_pictures_held_out_far_below_that_of_the_mean_picture():
    begun, done = learned(epochs=1).held_out, learned().held_out
    assert done > begun + 3, (begun, done)
    assert done > mean_picture_decibels() + 3, (done, mean_picture_decibels())


def test_the_same_seed_trains_the_same_generator_whatever_else_was_drawn():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    some = trained(*digits(200), 10, GeneratorSettings(latents=4, epochs=2), streams())
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = trained(*digits(200), 10, GeneratorSettings(latents=4, epochs=2), streams())
    other = trained(*digits(200), 10, GeneratorSettings(latents=4, epochs=2), streams(1))
    assert some.held_out == again.held_out != other.held_out
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in some.weights.items())


def test_latents_have_spread_one_around_the_mean_of_their_class():
    """A picture of a class is nearer to the class's mean picture than to those of others, by the generator's own."""
    weights = learned().weights
    means = decoded(weights, weights["centers"], (1, 8, 8))
    pictures, labels = digits()
    own = torch.stack([pictures[labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(means.flatten(1), own.flatten(1)).argmin(1)
    assert (nearest == torch.arange(10)).sum() >= 8
    # One unit along the widest direction changes a picture; along the narrowest, far less.
    moved = [decoded(weights, weights["centers"] + weights["scale"][:, place], (1, 8, 8)) for place in (0, -1)]
    narrow, wide = ((each - means).square().mean() for each in moved)
    assert wide > 2 * narrow


def test_a_class_without_pictures_lies_in_the_middle():
    pictures, labels = digits(200)
    some = labels != 3
    found = trained(pictures[some], labels[some], 12, GeneratorSettings(latents=4, epochs=1), streams()).weights
    for label in (3, 10, 11):
        torch.testing.assert_close(found["centers"][label], found["mean"])
    assert not torch.equal(found["centers"][2], found["mean"])


def test_progress_is_told_step_by_step():
    told = []
    pictures, labels = digits(200)
    trained(pictures, labels, 10, GeneratorSettings(latents=2, epochs=3), streams(), lambda *each: told.append(each))
    steps = 3 * batches_of(180)
    assert told == [(step + 1, steps) for step in range(steps)]


def test_passes_are_chosen_by_steps():
    assert GeneratorSettings().epochs_of(20_000) == 10
    assert GeneratorSettings().epochs_of(500) == 100
    assert GeneratorSettings(epochs=3).epochs_of(500) == 3
    assert training_seconds((1, 28, 28), GeneratorSettings()) == pytest.approx(45, rel=0.5)


def test_what_cannot_be_learned_from_is_one_line():
    with pytest.raises(FedveilError, match="at least 10 pictures, and there are 9"):
        trained(*(each[:9] for each in digits()), 10, GeneratorSettings(), streams())
    with pytest.raises(FedveilError, match="at least 8×8 pixels, not shape"):
        trained(torch.rand(20, 1, 7, 9), torch.zeros(20).long(), 10, GeneratorSettings(), streams())


def test_pictures_are_spread_evenly():
    assert evenly_spread(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert evenly_spread(9, 3).tolist() == [0, 3, 6]


def test_without_a_range_that_of_the_pictures_stands_in():
    given = torch.tensor([[-2.0, 0.0], [2.0, 1.0]]).reshape(2, 2, 1, 1)
    assert as_pixels(given, None).flatten().tolist() == [0, 0, 1, 1]


# ---- the file ------------------------------------------------------------------------------------------------


def test_a_file_says_what_the_generator_was_trained_on(tmp_path):
    prior, path = small_prior(), tmp_path / "prior.safetensors"
    prior.save(path)
    back = Prior.load(path)
    assert back.header.model_dump(exclude={"sha256"}) == prior.header.model_dump(exclude={"sha256"})
    assert all(torch.equal(tensor, prior.weights[name]) for name, tensor in back.weights.items())
    header = back.header
    assert (header.words, header.shape, header.latents, header.epochs) == (
        "100 training images of digits",
        (1, 8, 8),
        4,
        2,
    )
    assert header.normalization == task_of("lenet").normalization
    assert prior_at(str(path)) is prior_at(str(path))


def test_the_content_of_the_data_is_in_the_file():
    pictures, labels = digits(60)
    settings = GeneratorSettings(latents=2, epochs=1)

    def content(labels):
        return Prior.train(ArrayExamples(pictures, labels), "some", settings=settings).header.content

    assert content(labels) == content(labels) != content(labels.flip(0))


def changed(header=None, **tensors):
    made = small_prior()
    return made.header.model_copy(update=header or {}), {**made.weights, **tensors}


WRONG = {
    "another format": (changed({"format": "fedveil-capture"}), "is not a fedveil prior"),
    "another version": (changed({"version": VERSION + 1}), f"this fedveil reads version {VERSION}"),
    "another tensor": (changed(more=torch.zeros(1)), "has other tensors: more"),
    "another shape": (changed(mean=torch.zeros(5)), r"mean is torch.float32 of shape \(5,\), expected"),
    "another type": (changed(mean=torch.zeros(4).double()), "mean is torch.float64"),
    "not finite": (changed(scale=torch.full((4, 4), torch.nan)), "scale contains NaN or infinity"),
    "too small": (changed({"shape": (1, 4, 8)}), "at least 8×8 pixels"),
    "huge": (changed({"shape": (1, 10**9, 8)}), "shape.1 must be less than or equal to 4096"),
    "negative": (changed({"latents": -1}), "latents must be greater than or equal to 1"),
    "no latents": (changed({"latents": 2**16}), "expected torch.float32 of shape"),
    "other channels": (changed({"mean": (0.5, 0.5), "std": (1.0, 1.0)}), "another number of channels"),
    "no spread": (changed({"std": (0.0,)}), "must be positive"),
    "long words": (changed({"data": "x" * 300}), "data"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_hostile_file_is_one_line(tmp_path, name):
    (header, tensors), words = WRONG[name]
    path = tmp_path / "prior.safetensors"
    write_tensors(path, header, tensors)
    with pytest.raises(FedveilError, match=words) as caught:
        Prior.load(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_one_line(tmp_path):
    with pytest.raises(FedveilError, match="there is no fedveil prior at"):
        Prior.load(tmp_path / "none")
    with pytest.raises(FedveilError, match="there is no fedveil prior at"):
        prior_at("a\0b")
    (tmp_path / "text").write_text("hello, this is no tensor file")
    with pytest.raises(FedveilError, match="is damaged or not a fedveil prior"):
        Prior.load(tmp_path / "text")
    whole = tmp_path / "whole"
    small_prior().save(whole)
    content = bytearray(whole.read_bytes())
    content[-3] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    with pytest.raises(FedveilError, match="damaged: its contents do not match their hash"):
        Prior.load(tmp_path / "flipped")


def test_a_header_says_its_format():
    assert (small_prior().header.format, FORMAT) == ("fedveil-prior", "fedveil-prior")
    assert PriorHeader.model_fields["version"].default == VERSION


def test_only_pictures_of_one_class_each_are_learned_from():
    several = ArrayExamples(digits(20)[0], torch.ones(20, 3))
    with pytest.raises(FedveilError, match="pictures with one class each"):
        Prior.train(several, "several")
    flat = ArrayExamples(F.one_hot(torch.arange(20)).float(), torch.arange(20))
    with pytest.raises(FedveilError, match="at least 8×8 pixels"):
        Prior.train(flat, "flat")
