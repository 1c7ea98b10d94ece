"""A recipe is one TOML file; `load` turns it into one frozen `Config`."""

from mgrpo.config.load import dump, load, resolve, settled
from mgrpo.config.model import AgentConfig, Config, LearnerConfig, StageConfig, TinyModel

__all__ = ["AgentConfig", "Config", "LearnerConfig", "StageConfig", "TinyModel", "dump", "load", "resolve", "settled"]
