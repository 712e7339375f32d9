"""Checks that every part of a role must pass, for this repository's parts and for yours.

Each raises `AssertionError` with a sentence that says what is wrong. A plugin's test is one line a component:

    check_attention(component)
"""

from infermix.toolkit.conformance.attention import check_attention
from infermix.toolkit.conformance.component import (
    check_component,
    example_machine,
    example_model,
    machine_for,
    not_here,
)
from infermix.toolkit.conformance.decoder import check_decoder
from infermix.toolkit.conformance.distribution import check_distribution
from infermix.toolkit.conformance.kv import check_kv_layout
from infermix.toolkit.conformance.quantizer import check_quantizer
from infermix.toolkit.conformance.scheduler import check_scheduler, run_to_end
from infermix.toolkit.conformance.transform import TRANSFORM_FAMILIES, check_transform

__all__ = [
    "TRANSFORM_FAMILIES",
    "check_attention",
    "check_component",
    "check_decoder",
    "check_distribution",
    "check_kv_layout",
    "check_quantizer",
    "check_scheduler",
    "check_transform",
    "example_machine",
    "example_model",
    "machine_for",
    "not_here",
    "run_to_end",
]
