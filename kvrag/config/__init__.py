"""All options, declared once, with the checks of what a user passes.

::

    options (of the store, repair, sampling) → declare (classes, faults in words, signatures)
                                             → spelling (sizes with units, misspelt names)
                                             → address (of shared stores, without passwords)

Imports ``types`` and ``errors``.
"""

from kvrag.config.address import redacted
from kvrag.config.declare import (
    as_config,
    checks_names,
    config_class,
    fault_of,
    first_fault,
    option_field,
    options_class,
    parameters_of,
    parameters_of_function,
)
from kvrag.config.options import (
    DEFAULT_MAX_NEW_TOKENS,
    DEFAULT_PRIORITY,
    KV_DTYPES,
    MOST,
    RESERVED,
    STRATEGIES,
    Count,
    IndexOptions,
    Positive,
    Repair,
    RepairConfig,
    Retention,
    SamplingConfig,
    StoreConfig,
    check_mode,
    check_namespace,
    check_prove,
    check_template_kwargs,
    refuse_misplaced,
)
from kvrag.config.spelling import parse_bytes, respelt, unknown_option

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS",
    "DEFAULT_PRIORITY",
    "KV_DTYPES",
    "MOST",
    "RESERVED",
    "STRATEGIES",
    "Count",
    "IndexOptions",
    "Positive",
    "Repair",
    "RepairConfig",
    "Retention",
    "SamplingConfig",
    "StoreConfig",
    "as_config",
    "check_mode",
    "check_namespace",
    "check_prove",
    "check_template_kwargs",
    "checks_names",
    "config_class",
    "fault_of",
    "first_fault",
    "option_field",
    "options_class",
    "parameters_of",
    "parameters_of_function",
    "parse_bytes",
    "redacted",
    "refuse_misplaced",
    "respelt",
    "unknown_option",
]
