"""Controlled experiments: an ablation's question, the protocol that measures its arms, and the finding."""

from workbench.experiment.ablation import Ablation, Arm, Guard, Protocol
from workbench.experiment.finding import Finding

__all__ = ["Ablation", "Arm", "Finding", "Guard", "Protocol"]
