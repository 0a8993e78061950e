"""What work costs: hardware and model descriptions and the cost model that simulation and bounds share."""

from tiderl.cost.catalog import HARDWARE, cost_model
from tiderl.cost.model import CostModel, Hardware, ModelShape

__all__ = ["HARDWARE", "CostModel", "Hardware", "ModelShape", "cost_model"]
