"""Training: a differentiable forward over whole sequences, its losses, and one optimiser step."""

from models.training.forward import SequenceForward, forward_sequences
from models.training.loss import LossWeights, sequence_loss

__all__ = ["LossWeights", "SequenceForward", "forward_sequences", "sequence_loss"]
