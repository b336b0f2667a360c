"""Ahead-of-time compilation: what a step needs, before it runs."""

from axcore.aot.report import StepReport, compile_step

__all__ = ["StepReport", "compile_step"]
