"""A kernel that receives local shards, for tests in another process."""

from axcore.nn import ReferenceKernel
from axcore.parallel import active_layout


class LocalKernel(ReferenceKernel):
    """The reference kernel under `shard_map`. It raises if its inputs are larger than the shards of one device."""

    class Config(ReferenceKernel.Config):
        rows: int = 8
        num_heads: int = 4
        num_kv_heads: int = 2

    local = True

    def __call__(self, inputs):
        cfg, layout = self.config, active_layout()
        num_shards = layout.size_of if layout is not None else lambda axis: 1
        rows, seq, heads = (num_shards(axis) for axis in ("data", "context", "tensor"))
        k, query = inputs.plain.k, inputs.query
        expected = (cfg.rows // rows, 8 // seq, cfg.num_heads // heads, max(cfg.num_kv_heads // heads, 1))
        assert (*inputs.q.shape[:3], k.shape[2]) == expected, (inputs.q.shape, k.shape, expected)
        assert k.shape[1] == 8
        assert query.segment_ids.shape == inputs.q.shape[:2]
        assert inputs.sinks.shape == inputs.bias.heads.shape == inputs.dropout.heads.shape == (inputs.q.shape[2],)
        return super().__call__(inputs)
