"""One product for queries, keys and values; queries and keys normalized."""

from axcore.nn import Attention, Linear, RMSNorm


def attention() -> Attention.Config:
    norm = RMSNorm.Config()
    return Attention.Config(
        num_heads=4,
        num_kv_heads=2,
        query=None,
        key=None,
        value=None,
        qkv=Linear.Config(),
        query_norm=norm,
        key_norm=norm,
    )
