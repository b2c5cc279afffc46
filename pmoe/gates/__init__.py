"""Gates: which experts a token goes to, and with what weight. One gate a file."""

from pmoe.gates.base import Gate, Mix, Routing
from pmoe.gates.batch_prioritised import BatchPrioritisedGate
from pmoe.gates.deepseek import DeepSeekGate
from pmoe.gates.expert_choice import ExpertChoiceGate
from pmoe.gates.given import GivenGate
from pmoe.gates.hash import HashGate
from pmoe.gates.losses import load_balance_loss, router_z_loss
from pmoe.gates.noisy_topk import NoisyTopKGate
from pmoe.gates.random import RandomGate
from pmoe.gates.sigmoid import SigmoidGate
from pmoe.gates.soft import SoftGate
from pmoe.gates.switch import SwitchGate
from pmoe.gates.topk import TopKGate
from pmoe.gates.xmoe import XMoEGate

GATES: dict[str, type[Gate]] = {
    "topk": TopKGate,
    "switch": SwitchGate,
    "noisy_topk": NoisyTopKGate,
    "sigmoid": SigmoidGate,
    "deepseek": DeepSeekGate,
    "xmoe": XMoEGate,
    "expert_choice": ExpertChoiceGate,
    "soft": SoftGate,
    "batch_prioritised": BatchPrioritisedGate,
    "hash": HashGate,
    "random": RandomGate,
}

__all__ = [
    "GATES",
    "BatchPrioritisedGate",
    "DeepSeekGate",
    "ExpertChoiceGate",
    "Gate",
    "GivenGate",
    "HashGate",
    "Mix",
    "NoisyTopKGate",
    "RandomGate",
    "Routing",
    "SigmoidGate",
    "SoftGate",
    "SwitchGate",
    "TopKGate",
    "XMoEGate",
    "load_balance_loss",
    "router_z_loss",
]
