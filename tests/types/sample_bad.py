"""Mistakes that a type checker must find. Each line names its error codes."""

import axcore as ax
from axcore.nn import CausalLM, FeedForward, Linear


class Gate(ax.Layer):
    class Config(ax.Layer.Config):
        input_dim: int
        rank: int = 4
        inner: Linear.Config = Linear.Config()
        wrong: int = "four"  # expect: assignment


Gate.Config(input_dim=3, rnak=4)  # expect: call-arg
Gate.Config(input_dim=3, rank="four")  # expect: arg-type
Gate.Config(input_dim=3, inner=FeedForward.Config())  # expect: arg-type
Gate.Config(3, 4)  # expect: call-arg arg-type
Gate.Config(rank=4)  # expect: call-arg
node = Gate.Config(input_dim=3)
node.rank = 5  # expect: misc
print(node.rnak)  # expect: attr-defined
text: str = node.rank  # expect: assignment
print(node.set(rank=3).inner.use_bais)  # expect: attr-defined
print(ax.select(node, Linear).set(use_bias=True).rnak)  # expect: attr-defined
ax.select(node, 3)  # expect: arg-type
CausalLM.Config(vocab_size=8, dim=4.5)  # expect: arg-type
ax.fit(CausalLM.Config(vocab_size=8, dim=4))  # expect: arg-type call-arg
print(ax.Confg)  # expect: attr-defined
print(ax.nn.Liner)  # expect: attr-defined
ax.pipe(node, lambda cfg: None)  # expect: arg-type return-value
