"""The catalog of Iceberg tables: opened by its URI, and what goes wrong with it told as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NotInstalledError, RESTError, ServerError, ServiceUnavailableError
from requests.exceptions import RequestException

from tidelog.errors import InputError, StoreUnavailableError, TidelogError

_CHECK = "Check --catalog; it is sqlite:////path/catalog.db, postgresql+psycopg2://..., or http://host for REST"
_WAREHOUSE = "Say where tables are: --catalog-property warehouse=file:///path"
# Of SQLAlchemy, which only SQL catalogs need. By name, since it may not be there.
_SQL_MISTAKES = ("ArgumentError", "NoSuchModuleError")
_SQL_FAILURES = ("OperationalError", "InterfaceError", "TimeoutError")


def open_catalog(uri: str, properties: dict[str, str]) -> Catalog:
    """The catalog at a URI: `sqlite:///path`, `postgresql://...`, or `http(s)://` for a REST catalog."""
    kind = "rest" if uri.startswith(("http://", "https://")) else "sql"
    with told_of_catalog():
        return load_catalog("tidelog", **{"type": kind, "uri": uri, **properties})


@contextmanager
def told_of_catalog() -> Iterator[None]:
    """In the body pyiceberg works: what it, its database or its server raises is InputError or StoreUnavailableError.

    Errors that say what became of a commit are for whoever commits: they stay what they are inside of it.
    """
    try:
        yield
    except TidelogError:
        raise
    except (RequestException, ServerError, ServiceUnavailableError) as error:
        raise StoreUnavailableError(f"the catalog gives no answer: {_reason(error)}", hint=_CHECK) from error
    except (RESTError, NotInstalledError) as error:
        raise InputError(f"the catalog refuses: {_reason(error)}", hint=_CHECK) from error
    except ValueError as error:
        hint = _WAREHOUSE if "default path" in str(error) else _CHECK
        raise InputError(f"the catalog cannot do this: {_reason(error)}", hint=hint) from error
    except Exception as error:
        if type(error).__module__ != "sqlalchemy.exc":
            raise
        raise _of_sql(error) from error


def _of_sql(error: Exception) -> Exception:
    name = type(error).__name__
    if name in _SQL_MISTAKES:
        return InputError(f"the catalog cannot be opened: {_reason(error)}", hint=_CHECK)
    if name in _SQL_FAILURES:
        return StoreUnavailableError(f"the database of the catalog does not work: {_reason(error)}", hint=_CHECK)
    return error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
