"""What axcore-new-grammar-compiler offers. Imports neither jax nor flax."""

from axcore.plugin import GrammarCompilerOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_grammar_compilers() -> list[GrammarCompilerOffer]:
    target = "axcore_new_grammar_compiler.choices:Choices"
    return [GrammarCompilerOffer("new-grammar-compiler", target, "One of several texts.")]
