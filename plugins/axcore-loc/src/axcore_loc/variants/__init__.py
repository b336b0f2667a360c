"""Models and attentions that features are attached to. None of them knows of any plugin.

They are copied, as they stand, into a distribution of their own (`axcore_loc.workspace`); their sources are what is
counted. Each file is one variant and has one function: `recipe(attention)` in `models`, `attention()` in `attentions`.
"""
