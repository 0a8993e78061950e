"""What work costs: hardware and model descriptions, the cost model that simulation and bounds share, and the bound."""

from tiderl.cost.catalog import HARDWARE, cost_model
from tiderl.cost.model import CostModel
from tiderl.cost.models import MODELS, ModelShape

__all__ = ["HARDWARE", "MODELS", "CostModel", "ModelShape", "cost_model"]
