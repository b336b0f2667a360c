"""Number formats: the representation of a layer's weight, and products with it."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.numerics.base import Numerics, Weight
from axcore.numerics.calibration import CalibrationState, calibrated, require_calibrated
from axcore.numerics.gather import gather
from axcore.numerics.product import Product
from axcore.numerics.storing import StoredModel, stored

__all__ = [
    "CalibrationState",
    "Numerics",
    "Product",
    "StoredModel",
    "Weight",
    "calibrated",
    "gather",
    "require_calibrated",
    "stored",
]


def __dir__() -> list[str]:
    return __all__
