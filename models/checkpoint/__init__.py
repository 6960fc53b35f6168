"""Checkpoints: a release's safetensors files in, Orbax folders out, parameters on devices."""

from models.checkpoint.convert import Report, convert
from models.checkpoint.restore import load_checkpoint, load_release, save_checkpoint

__all__ = ["Report", "convert", "load_checkpoint", "load_release", "save_checkpoint"]
