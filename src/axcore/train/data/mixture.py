"""Several sources in given proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from axcore import config
from axcore.train.data.source import Document, Source, Split, located

if TYPE_CHECKING:
    import grain


class Mixture(Source):
    """Named sources, each with its share of the training tokens.

    Rows are mixed after packing, so the shares count tokens, whatever the lengths of documents. Each source
    repeats its documents when all have been read. Validation reads the documents of all sources, one source after the
    other, without weights.
    """

    class Config(Source.Config):
        sources: Mapping[str, Source.Config] = config.REQUIRED
        """The sources by name."""
        weights: Mapping[str, config.PositiveFloat] = config.REQUIRED
        """Relative share of each source in the training tokens. The weights need not sum to 1."""

    config: Config

    def __init__(self, cfg: Config):
        """
        Raises:
            ConfigError: there is no source; a weight is missing or without a source; or a source raises.
        """
        if not cfg.sources:
            raise config.ConfigError("sources is empty. Give at least one.")
        if cfg.sources.keys() != cfg.weights.keys():
            raise config.ConfigError(
                f"the weights are {sorted(cfg.weights)}, but the sources are {sorted(cfg.sources)}. Give each source "
                f"one weight."
            )
        self.config = cfg
        self._sources: dict[str, Source] = {}
        for name, source in cfg.sources.items():
            with located(f"sources.{name}"):
                self._sources[name] = source.build()

    def parts(self) -> Mapping[str, tuple[float, Source]]:
        """See `Source.parts`. A mixture within a mixture contributes its own sources."""
        parts = {}
        total = math.fsum(self.config.weights.values())
        for name, source in self._sources.items():
            for below, (share, part) in source.parts().items():
                parts[f"{name}.{below}" if below else name] = share * self.config.weights[name] / total, part
        return parts

    def documents(self, split: Split, piece_bytes: int) -> grain.MapDataset[Document]:
        """The documents of all sources, one source after the other."""
        import grain

        found = []
        for name, source in self._sources.items():
            with located(f"sources.{name}"):
                found.append(source.documents(split, piece_bytes))
        return grain.MapDataset.concatenate(found)
