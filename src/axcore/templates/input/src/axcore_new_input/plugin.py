"""What axcore-new-input offers. Imports neither jax nor flax."""

from axcore.plugin import SourceOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_input_sources() -> list[SourceOffer]:
    target = "axcore_new_input.sqlite:SqliteTable"
    return [SourceOffer("new-input", target, "A document for each row of a SQLite table.")]
