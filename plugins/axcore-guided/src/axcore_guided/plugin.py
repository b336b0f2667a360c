"""What axcore-guided offers. Imports neither jax nor flax."""

from axcore.plugin import GrammarCompilerOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_grammar_compilers() -> list[GrammarCompilerOffer]:
    target = "axcore_guided.compiler:LLGuidance"
    return [GrammarCompilerOffer("llguidance", target, "Regular expressions, JSON schemas, choices, Lark and GBNF.")]
