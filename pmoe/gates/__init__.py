"""Gates: which experts a token goes to, and with what weight. One gate a file."""

from pmoe.gates.base import Gate, Routing
from pmoe.gates.losses import load_balance_loss, router_z_loss
from pmoe.gates.switch import SwitchGate
from pmoe.gates.topk import TopKGate

GATES: dict[str, type[TopKGate]] = {"topk": TopKGate, "switch": SwitchGate}

__all__ = ["GATES", "Gate", "Routing", "SwitchGate", "TopKGate", "load_balance_loss", "router_z_loss"]
