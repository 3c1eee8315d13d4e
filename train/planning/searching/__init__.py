"""The settings with which a run is fastest on a machine, found with few compilations.

`space` lists the candidates, `predicting` and `compiling` say what one of them needs and takes,
`ranking` learns from those that were compiled, `search` chooses what is compiled, and `gin_file`,
`tables` and `frontier` show what was found.
"""

from train.planning.searching.candidate import Candidate as Candidate, Layout as Layout
from train.planning.searching.run_sizes import RunSizes as RunSizes
from train.planning.searching.search import (
    Found as Found,
    Outcome as Outcome,
    Prediction as Prediction,
    SearchResult as SearchResult,
    search as search,
)
from train.planning.searching.space import (
    Choices as Choices,
    Space as Space,
    list_space as list_space,
)
