"""A function over the rows of a DataFrame, as Arrow batches, without pandas.

`DataFrame.mapInArrow` does the same, and asks for pandas although it uses none of it: what is built here is what it
builds behind that question. Over Spark Connect, whose client insists on pandas anyway, it is the method itself.

Invariants
- The function is called once a task, with the batches of its partition; what it yields has the schema exactly.
- It is found by its name, or is an object of a class that is, in a module that the workers can import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

BatchFunction = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def map_in_arrow(rows: DataFrame, function: BatchFunction, schema: str) -> DataFrame:
    """What the function makes of the rows of each partition; `schema` is that of what it yields."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
    from pyspark.sql.udf import _create_udf
    from pyspark.util import PythonEvalType

    if not isinstance(rows, ClassicDataFrame):
        return rows.mapInArrow(function, schema)
    work: Any = _create_udf(f=function, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF, returnType=schema)
    column = work(*(rows[name] for name in rows.columns))
    return ClassicDataFrame(rows._jdf.mapInArrow(column._jc, False, None), rows.sparkSession)
