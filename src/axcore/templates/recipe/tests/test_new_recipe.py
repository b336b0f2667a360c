"""axcore-new-recipe is a complete config, and its model can be trained."""

from axcore.testing import RecipeSuite


class TestRecipe(RecipeSuite):
    name = "new-recipe"
    largest = 500_000
