"""Grants and SCRAM users for Kafka's tools: `kafka-acls`, `kafka-configs --entity-type users`, and admin clients.

    Kafka's binding                              grant
    User:alice ALLOW READ  on Topic PREFIXED shop.        alice read  topic:shop/*
    User:*     ALLOW WRITE on Group LITERAL  billing      *     write group:billing
    User:ops   ALLOW ALL   on Cluster kafka-cluster       ops   admin server

Invariants
- What is shown is what counts, and what is accepted means the same in both models. READ and WRITE are the same, ALL is
  `admin`, DESCRIBE of the cluster is `read` on the server. Other operations, DENY and rules by host are refused: there
  is no grant that means just that.
- A grant for everything is shown as four bindings, and is taken back as one, by `tidelog auth revoke`.
- A password never comes here: Kafka's clients salt it, and the keys are made from that. The scrypt hash of an older
  password counts no more then, so PLAIN needs `tidelog auth user passwd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tidelog.errors import InputError, NotFoundError, TidelogError
from tidelog.service.auth.access import ANYONE, Grant, Kind, Pattern, Permission, check_principal_name, parse_pattern
from tidelog.service.auth.accounts import Change, granting, revoking, setting_scram
from tidelog.service.auth.scram import FEWEST_ITERATIONS, MECHANISMS, keys_of_salted
from tidelog.service.auth.security import Security
from tidelog.service.kafka.broker import error_code
from tidelog.service.kafka.codec import APIS, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.requests import Handler, RequestContext, listed_name, topic_name
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import parse_topic_name

_DESCRIBE_ACLS, _CREATE_ACLS, _DELETE_ACLS = 29, 30, 31
_DESCRIBE_SCRAM, _ALTER_SCRAM = 50, 51
_ANY, _MATCH, _LITERAL, _PREFIXED = 1, 2, 3, 4
_ALL, _READ, _WRITE, _DESCRIBE = 2, 3, 4, 8
_ALLOW = 3
_CLUSTER = "kafka-cluster"
_ANY_HOST = "*"
_KINDS = {2: Kind.TOPIC, 3: Kind.GROUP, 4: Kind.SERVER, 5: Kind.TRANSACTION}
_TYPES = {kind: number for number, kind in _KINDS.items()}
_SCRAM = dict(enumerate(MECHANISMS, start=1))
_MOST_ITERATIONS = 16_384  # Kafka's own limit


class Binding(NamedTuple):
    """A grant as Kafka shows it."""

    resource_type: int
    name: str
    pattern_type: int
    principal: str
    operation: int
    grant: Grant
    """The grant that it is, or a part of."""

    @property
    def is_whole(self) -> bool:
        return self.grant.resource.kind is not None


def bindings_of(grant: Grant) -> list[Binding]:
    """How Kafka shows a grant; engines it does not know."""
    resource = grant.resource
    kinds = list(_TYPES) if resource.kind is None else [resource.kind]
    found = []
    for kind in kinds:
        if kind in _TYPES:
            name, pattern_type = _shown(kind, resource.name)
            operation = _operation(kind, grant.permission)
            found.append(Binding(_TYPES[kind], name, pattern_type, f"User:{grant.principal}", operation, grant))
    return found


def _operation(kind: Kind, permission: Permission) -> int:
    if permission is Permission.ADMIN:
        return _ALL
    if kind is Kind.SERVER:
        return _DESCRIBE
    return _READ if permission is Permission.READ else _WRITE


def _shown(kind: Kind, name: str) -> tuple[str, int]:
    """Name and type of a pattern."""
    if kind is Kind.SERVER:
        return _CLUSTER, _LITERAL
    if name == ANYONE:
        return ANYONE, _LITERAL
    is_prefix = name.endswith("*")
    plain = name[:-1] if is_prefix else name
    if kind is Kind.TOPIC and not is_prefix:
        plain = listed_name(parse_topic_name(plain))
    elif kind is Kind.TOPIC and "." not in plain.partition("/")[0]:
        plain = plain.replace("/", ".", 1)
    return plain, _PREFIXED if is_prefix else _LITERAL


def _pattern(kind: Kind, name: str, pattern_type: int) -> Pattern:
    """What a name of Kafka's means; InputError when nothing here does."""
    if kind is Kind.SERVER:
        if name != _CLUSTER:
            raise InputError(f"the only cluster is {_CLUSTER}")
        return Pattern(Kind.SERVER)
    if pattern_type not in (_LITERAL, _PREFIXED):
        raise InputError("the pattern type must be LITERAL or PREFIXED")
    if name == ANYONE and pattern_type == _LITERAL:
        return Pattern(kind)
    if "*" in name:
        raise InputError("a name of a rule has no * in it; PREFIXED rules are for that")
    if kind is Kind.TOPIC and pattern_type == _LITERAL:
        name = str(topic_name(name))
    elif kind is Kind.TOPIC and "/" not in name:
        name = name.replace(".", "/", 1)
    return parse_pattern(f"{kind}:{name}{'*' if pattern_type == _PREFIXED else ''}")


def grant_of(asked: Any) -> Grant:
    """The grant that a binding means; InputError says why there is none."""
    kind = _KINDS.get(asked.resource_type)
    if kind is None:
        raise InputError("rules are for topics, groups, transactional ids and the cluster")
    if asked.permission_type != _ALLOW or asked.host != _ANY_HOST:
        raise InputError("rules allow, and for every host: what nothing allows is refused")
    permissions = {_ALL: Permission.ADMIN, _READ: Permission.READ, _WRITE: Permission.WRITE}
    if kind is Kind.SERVER:
        permissions = {_ALL: Permission.ADMIN, _DESCRIBE: Permission.READ}
    permission = permissions.get(asked.operation)
    if permission is None:
        raise InputError("an operation must be READ, WRITE or ALL (of the cluster: DESCRIBE or ALL); others follow")
    prefix, _, principal = asked.principal.partition(":")
    if prefix != "User" or not principal:
        raise InputError("a principal must be User:NAME")
    if principal != ANYONE:
        check_principal_name(principal)
    return Grant(principal, permission, _pattern(kind, asked.resource_name, asked.resource_pattern_type))


def is_asked_for(binding: Binding, asked: Any) -> bool:
    """Whether a filter finds a binding."""
    return (
        asked.resource_type_filter in (_ANY, binding.resource_type)
        and (asked.principal_filter in (None, binding.principal))
        and asked.host_filter in (None, _ANY_HOST)
        and asked.operation in (_ANY, binding.operation)
        and asked.permission_type in (_ANY, _ALLOW)
        and _is_named(binding, asked.resource_name_filter, asked.pattern_type_filter)
    )


def _is_named(binding: Binding, name: str | None, pattern_type: int) -> bool:
    is_prefix = binding.pattern_type == _PREFIXED
    if pattern_type == _MATCH:
        is_covered = binding.name == ANYONE or (is_prefix and name is not None and name.startswith(binding.name))
        return name is None or is_covered or (not is_prefix and name == binding.name)
    return pattern_type in (_ANY, binding.pattern_type) and name in (None, binding.name)


class AccountRequests:
    """Answers requests about grants and SCRAM credentials; the server lets administrators through."""

    def __init__(self, security: Security, now_us: Callable[[], int]) -> None:
        self._security = security
        self._now_us = now_us

    def handlers(self) -> dict[int, Handler]:
        return {
            _DESCRIBE_ACLS: self._describe,
            _CREATE_ACLS: self._create,
            _DELETE_ACLS: self._delete,
            _DESCRIBE_SCRAM: self._describe_scram,
            _ALTER_SCRAM: self._alter_scram,
        }

    async def _change(self, context: RequestContext, subject: str, change: Change) -> None:
        """Stores a change, which counts when this returns."""
        await in_store_thread(self._security.accounts.change, change)
        await self._security.reload_accounts()
        self._security.audit.changed(context.principal, APIS[context.api_key].name, subject, context.client_host)

    def _bindings(self) -> list[Binding]:
        return [binding for grant in self._security.known.grants for binding in bindings_of(grant)]

    async def _describe(self, context: RequestContext, request: Any) -> Any:
        module = wire(_DESCRIBE_ACLS)
        resources: dict[tuple[int, str, int], list[Any]] = {}
        for one in self._bindings():
            if is_asked_for(one, request):
                described = module.DescribeAclsResponseAclDescription(one.principal, _ANY_HOST, one.operation, _ALLOW)
                resources.setdefault((one.resource_type, one.name, one.pattern_type), []).append(described)
        return module.DescribeAclsResponse(
            error_message=None,
            resources=[module.DescribeAclsResponseResource(*key, acls) for key, acls in sorted(resources.items())],
        )

    async def _create(self, context: RequestContext, request: Any) -> Any:
        module, results = wire(_CREATE_ACLS), []
        for asked in request.creations:
            try:
                grant = grant_of(asked)
                await self._change(context, f"{grant.principal} {grant.permission} {grant.resource}", granting(grant))
            except TidelogError as error:
                results.append(module.CreateAclsResponseAclCreationResult(error_code(error), error.message))
            else:
                results.append(module.CreateAclsResponseAclCreationResult(ErrorCode.NONE, None))
        return module.CreateAclsResponse(results=results)

    async def _delete(self, context: RequestContext, request: Any) -> Any:
        module, results = wire(_DELETE_ACLS), []
        for asked in request.filters:
            found = [one for one in self._bindings() if is_asked_for(one, asked)]
            answers = [await self._deleted(context, one) for one in found]
            results.append(module.DeleteAclsResponseFilterResult(ErrorCode.NONE, None, answers))
        return module.DeleteAclsResponse(filter_results=results)

    async def _deleted(self, context: RequestContext, one: Binding) -> Any:
        code, words = ErrorCode.NONE, None
        try:
            if not one.is_whole:
                raise InputError("this is part of a grant for everything: `tidelog auth revoke` takes it back")
            subject = f"{one.grant.principal} {one.grant.permission} {one.grant.resource}"
            await self._change(context, subject, revoking(one.grant))
        except NotFoundError:
            pass  # somebody else was first
        except TidelogError as error:
            code, words = error_code(error), error.message
        return wire(_DELETE_ACLS).DeleteAclsResponseMatchingAcl(
            code, words, one.resource_type, one.name, one.pattern_type, one.principal, _ANY_HOST, one.operation, _ALLOW
        )

    # SCRAM

    async def _describe_scram(self, context: RequestContext, request: Any) -> Any:
        module, users = wire(_DESCRIBE_SCRAM), self._security.known.users
        names = sorted(users) if not request.users else [one.name for one in request.users]
        info = module.DescribeUserScramCredentialsResponseCredentialInfo
        results = []
        for name in dict.fromkeys(names):
            user = users.get(name)
            result = module.DescribeUserScramCredentialsResponseResult(user=name, error_message=None)
            if names.count(name) > 1:
                result.error_code, result.error_message = ErrorCode.DUPLICATE_RESOURCE, "The user is named twice."
            elif user is None or not user.scram:
                result.error_code, result.error_message = ErrorCode.RESOURCE_NOT_FOUND, "The user has no credentials."
            else:
                known = [(number, user.scram[name]) for number, name in _SCRAM.items() if name in user.scram]
                result.credential_infos = [info(number, keys.iterations) for number, keys in known]
            results.append(result)
        return module.DescribeUserScramCredentialsResponse(error_message=None, results=results)

    async def _alter_scram(self, context: RequestContext, request: Any) -> Any:
        module = wire(_ALTER_SCRAM)
        asked = [*request.deletions, *request.upsertions]
        results = []
        for name in dict.fromkeys(one.name for one in asked):
            code, words = await self._altered(context, name, [one for one in asked if one.name == name])
            results.append(module.AlterUserScramCredentialsResponseResult(name, code, words))
        return module.AlterUserScramCredentialsResponse(results=results)

    async def _altered(self, context: RequestContext, name: str, asked: list[Any]) -> tuple[ErrorCode, str | None]:
        problem = _problem_of(name, asked)
        if problem is not None:
            return problem
        try:
            for one in asked:
                mechanism = _SCRAM[one.mechanism]
                await self._change(context, f"{name} {mechanism}", self._scram_change(name, mechanism, one))
        except NotFoundError:
            return ErrorCode.RESOURCE_NOT_FOUND, "The user has no such credential."
        except TidelogError as error:
            return error_code(error), error.message
        return ErrorCode.NONE, None

    def _scram_change(self, name: str, mechanism: str, asked: Any) -> Change:
        if not hasattr(asked, "salted_password"):
            return setting_scram(name, mechanism, None, self._now_us())
        salted, salt = bytes(asked.salted_password), bytes(asked.salt)
        keys = keys_of_salted(MECHANISMS[mechanism], salted, salt, asked.iterations)
        return setting_scram(name, mechanism, keys, self._now_us())


def _problem_of(name: str, asked: Iterable[Any]) -> tuple[ErrorCode, str] | None:
    """Why the credentials of a user cannot be altered so."""
    mechanisms = [one.mechanism for one in asked]
    if len(set(mechanisms)) < len(mechanisms):
        return ErrorCode.DUPLICATE_RESOURCE, "A mechanism of the user is altered twice."
    if not set(mechanisms) <= set(_SCRAM):
        return ErrorCode.UNSUPPORTED_SASL_MECHANISM, "The mechanism must be SCRAM-SHA-256 or SCRAM-SHA-512."
    try:
        check_principal_name(name)
    except InputError as error:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, error.message
    for one in asked:
        if hasattr(one, "salted_password"):
            if not FEWEST_ITERATIONS <= one.iterations <= _MOST_ITERATIONS:
                words = f"Iterations must be {FEWEST_ITERATIONS} to {_MOST_ITERATIONS}."
                return ErrorCode.UNACCEPTABLE_CREDENTIAL, words
            if not one.salt or not one.salted_password:
                return ErrorCode.UNACCEPTABLE_CREDENTIAL, "The salt or the salted password is empty."
    return None
