"""Images with and without a class, by scores some of which are equal."""

import numpy as np
from hypothesis import strategies as st


@st.composite
def rankings(draw):
    count = draw(st.integers(4, 40))
    positive = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    positive[:2] = True, False
    levels = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return positive, np.array(levels) / 10
