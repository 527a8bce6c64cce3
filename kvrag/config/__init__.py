"""All options, declared once, with the checks of what a user passes.

::

    options (of the engine, the store, a request) → spelling (sizes with units, misspelt names)
                                                  → address (of shared stores, without passwords)
    signatures: options as editors read them

Imports ``types`` and ``errors``.
"""

from kvrag.config.options import (
    DEFAULT_MAX_NEW_TOKENS,
    DEFAULT_PRIORITY,
    KV_DTYPES,
    MOST,
    RESERVED,
    STRATEGIES,
    Repair,
    RepairConfig,
    Retention,
    SamplingConfig,
    StoreConfig,
    as_config,
    check_continues,
    check_mode,
    check_namespace,
    check_prove,
    check_template_kwargs,
    fault_of,
    option_fields,
    refuse_misplaced,
    unknown_option,
)

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS",
    "DEFAULT_PRIORITY",
    "KV_DTYPES",
    "MOST",
    "RESERVED",
    "STRATEGIES",
    "Repair",
    "RepairConfig",
    "Retention",
    "SamplingConfig",
    "StoreConfig",
    "as_config",
    "check_continues",
    "check_mode",
    "check_namespace",
    "check_prove",
    "check_template_kwargs",
    "fault_of",
    "option_fields",
    "refuse_misplaced",
    "unknown_option",
]
