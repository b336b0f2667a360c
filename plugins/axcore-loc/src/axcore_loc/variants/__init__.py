"""Models and attentions that features are attached to. They do not refer to any plugin.

They are copied unchanged into a separate distribution (`axcore_loc.workspace`), whose sources are counted. Each file is
one variant with one function: `recipe(attention)` in `models`, `attention()` in `attentions`.
"""
