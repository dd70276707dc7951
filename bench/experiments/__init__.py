"""The paper's experiments on models of one's own: python -m bench.experiments --help. A module each."""

from bench.experiments import (
    agent,
    blocks,
    decisions,
    landscape,
    placement,
    probes,
    seams,
    toggles,
    transplanted,
)
from bench.experiments.frame import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "decisions": decisions,
    "landscape": landscape,
    "transplanted": transplanted,
    "probes": probes,
    "seams": seams,
    "placement": placement,
    "blocks": blocks,
    "toggles": toggles,
    "agent": agent,
}
