"""The laws of laws.py for every registered defense, and what the fields of each refuse."""

import math

import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.registry import defenses

from . import laws

every = pytest.mark.parametrize("spec", [spec for _, spec in laws.EVERY])


@pytest.mark.parametrize("spec", [spec for specs in laws.IDENTITY.values() for spec in specs])
def test_identity_settings_change_nothing(spec):
    laws.identity_settings_change_nothing(spec)


@every
@pytest.mark.parametrize(
    "law",
    [
        laws.same_seed_same_result,
        laws.chunks_and_order_of_clients_change_nothing,
        laws.a_single_number_is_a_parameter_too,
        laws.complex_entries_are_refused,
        laws.says_what_an_informed_attacker_does,
        laws.input_is_not_modified,
        laws.zero_updates_stay_finite,
        laws.knowledge_has_the_shapes_of_the_update,
        laws.knowledge_treats_clients_apart,
        laws.measures_are_plain_numbers,
        laws.spelling_reads_back,
        laws.says_what_it_is,
        laws.has_a_strength_axis,
    ],
    ids=lambda law: law.__name__,
)
def test_law(law, spec):
    law(spec)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_keeps_type_and_shapes(spec, dtype):
    laws.keeps_type_and_shapes(spec, dtype)


@pytest.mark.parametrize("spec", laws.PROTECTING)
def test_an_update_alone_is_enough(spec):
    laws.an_update_alone_is_enough(spec)


@pytest.mark.parametrize("spec", laws.SERVERS)
def test_a_trusted_server_bounds_every_client_and_adds_noise_to_the_sum(spec):
    laws.a_trusted_server_bounds_every_client_and_adds_noise_to_the_sum(spec)


@pytest.mark.parametrize("spec", laws.PROTECTING)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_numbers_are_not_hidden(spec, value):
    laws.bad_numbers_are_not_hidden(spec, value)


@every
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_inputs_are_not_hidden(spec, value):
    laws.bad_inputs_are_not_hidden(spec, value)


def test_the_tables_of_settings_name_registered_defenses():
    assert set(laws.IDENTITY) <= set(laws.NAMES)
    assert set(laws.SETTINGS) <= set(laws.NAMES)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("gaussian-noise:sigma=-0.1", "sigma must be greater than or equal to 0"),
        ("gaussian-noise:sigma=nan", "sigma"),
        ("gaussian-noise:sigma=inf", "sigma"),
        ("gaussian-noise:at=server", "at must be 'gradient' or 'upload'"),
        ("laplace-noise:scale=-1", "scale must be greater than or equal to 0"),
        ("clip:norm=0", "norm must be greater than 0"),
        ("clip:order=l3", "order must be 'l1' or 'l2'"),
        ("gradient-dropout:keep=0", "keep must be greater than 0"),
        ("gradient-dropout:keep=1.1", "keep must be less than or equal to 1"),
        ("gradient-dropout:sigma=-1,keep=2", "keep must be less than or equal to 1"),
        ("gradient-dropout:p=0.5", "no field 'p'"),
        ("none:sigma=1", "no field 'sigma'"),
    ],
)
def test_fields_out_of_range_are_refused_in_one_line(spec, words):
    with pytest.raises(FedveilError) as caught:
        defenses.parse(spec)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
