"""The console, clicked through in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.chromium import Chromium, Page, until
from tests.service.http.serving import Served, serving
from tests.service.kafka.secured import change_accounts, grant

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.service.auth.accounts import adding_token, granting, make_token
from tidelog.service.auth.security import Security

ORDERS = "#/topics/shop/orders"
FIRST_ROW = "document.querySelector('table.messages tr.pick').innerText"


def cold_requests(served: Served) -> int:
    """How many ranges of objects the server has read from the store for shop/orders."""

    def look() -> int:
        topics = served.node.http.broker.topics()
        (orders,) = [topic for topic in topics if str(topic.name) == "shop/orders"]
        tiers = [partition.topic.statistics().tier for partition in orders.open.values()]
        return sum(tier.history.requests for tier in tiers if tier is not None)

    found: int = served.in_loop(look)
    return found


def test_overview_shows_topics_and_what_a_lost_disk_would_cost(page: Page, served: Served) -> None:
    """Topics are listed without being opened; once open, the restore point counts what is not shipped."""
    page.see("shop/orders")
    page.see("topics not open yet")
    page.click("button", "Open them")
    page.see("would be lost")
    page.see("this node, epoch")
    page.fill("input[data-filter]", "clicks")
    page.gone("shop/orders", "table")
    page.click("a", "shop/clicks")
    page.see("partition 2")


def test_opening_pages_reads_nothing_from_the_store(page: Page, served: Served) -> None:
    """The loss: a bill for history that nobody asked for. What is in the store is read after a click that says so."""
    page.go(ORDERS)
    page.wait(f"{FIRST_ROW}.includes('89')")
    for tab in ("partitions", "subscriptions", "settings", "letters"):
        page.go(f"{ORDERS}/{tab}")
        page.wait(f"document.querySelector('.tabs [aria-current]').getAttribute('href').endsWith('{tab}')")
    assert cold_requests(served) == 0
    page.go(ORDERS)
    page.fill("select", "earliest", "Read from")
    page.click("main button", "Read")
    page.see("in the object store")
    assert cold_requests(served) == 0
    page.click("button", "Read from the store")
    page.wait(f"{FIRST_ROW}.startsWith('0\\t')")
    assert cold_requests(served) > 0


def test_messages_are_browsed_filtered_and_looked_into(page: Page) -> None:
    """From an offset, as JSON and hex, with key and headers, and by a text; j, k, Enter and Esc move through them."""
    page.go(ORDERS)
    page.wait(f"{FIRST_ROW}.includes('89')")
    page.fill("select", "offset", "Read from")
    page.fill("input[type=number]", "82", "Offset")
    page.click("main button", "Read")
    page.wait(f"{FIRST_ROW}.startsWith('82')")
    page.evaluate("document.activeElement.blur()")
    page.press("j")
    page.press("j")
    page.wait("document.activeElement.dataset.offset === '83'")
    page.press("Enter")
    page.see('"order": 83,', "pre")
    page.press("Escape")
    page.wait("document.querySelector('tr.detail') === null")
    page.press("/")
    page.wait("document.activeElement.dataset.filter !== undefined")
    page.fill("input[data-filter]", '"order": 85')
    page.wait("document.querySelectorAll('table.messages tr.pick').length === 1")
    page.fill("select", "hex", "Show as")
    page.see("7b 22 6f 72 64 65 72", "td.value")


def test_newest_of_all_partitions_come_first(page: Page, served: Served) -> None:
    """The loss: the newest message of a topic with partitions was cut off by older ones of the others."""
    for partition in ("0", "1", "2"):
        served.produce("shop/clicks", *(f"older {number}" for number in range(60)), partition=partition)
    served.produce("shop/clicks", "the newest", partition="1")
    page.go("#/topics/shop/clicks")
    page.wait(f"{FIRST_ROW}.includes('the newest')")
    page.wait("document.querySelectorAll('table.messages tr.pick').length === 50")


def test_live_tail_follows_pauses_and_goes_on(page: Page, served: Served) -> None:
    """New messages appear; while it is paused they wait, and come when it goes on."""
    page.go(ORDERS)
    page.click("button", "Follow live")
    page.wait("document.querySelector('[data-following]') !== null")
    served.produce("shop/orders", "first-live")
    page.see("first-live", "td.value")
    page.click("button", "Pause")
    served.produce("shop/orders", "second-live")
    page.see("1 message waiting")
    page.gone("second-live", "table")
    page.click("button", "Go on")
    page.see("second-live", "td.value")
    page.click("button", "Stop following")
    page.gone("Following the end")


def test_message_is_produced_and_produced_again(page: Page, served: Served) -> None:
    """With key, headers and a value; looked into, it can be sent once more, as it was."""
    page.go("#/topics/audit/empty")
    page.see("No messages here")
    page.click("button", "Produce")
    page.fill("dialog input", "k1")
    page.fill("dialog textarea[name=value]", '{"a": 1}')
    page.fill("dialog textarea[placeholder]", "trace: 77")
    page.click("dialog button[type=submit]")
    page.see('{"a": 1}', "td.value")
    page.click("table.messages tr.pick")
    page.click("button", "Produce again")
    page.click("dialog button[type=submit]")
    until(lambda: len(read(served, "audit/empty")) == 2, "the second message")
    first, second = read(served, "audit/empty")
    for name in ("key", "value", "headers"):
        assert first[name] == second[name]
    assert (first["key"], first["value"], first["headers"]) == ("k1", '{"a": 1}', [["trace", "77"]])


def read(served: Served, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.ok("GET", f"/v1/topics/{topic}/messages")["messages"]
    return found


def test_topic_is_created_configured_purged_and_deleted(page: Page, served: Served) -> None:
    """What cannot be undone needs the name of the topic, typed."""
    page.click("button", "Create topic")
    page.fill("dialog input[type=text]", "shop/returns")
    page.click("dialog button[type=submit]")
    page.see("No messages here")
    served.produce("shop/returns", "one", "two")
    page.go("#/topics/shop/returns/settings")
    page.click("button", "Change retention_seconds")
    page.fill("dialog input", "3600")
    page.click("dialog button[type=submit]")
    page.see("3600", "span.own")
    assert served.ok("GET", "/v1/topics/shop/returns")["settings"]["retention_seconds"] == 3600
    page.go("#/topics/shop/returns")
    page.wait("document.querySelectorAll('table.messages tr.pick').length === 2")
    page.click("button", "Purge")
    assert page.evaluate("document.querySelector('dialog button[type=submit]').disabled") is True
    page.fill("dialog input[type=text]", "shop/returns")
    page.click("dialog button[type=submit]")
    page.see("No messages here")
    assert served.ok("GET", "/v1/topics/shop/returns")["partitions"][0]["start_offset"] == 2
    page.click("button", "Delete")
    page.fill("dialog input[type=text]", "shop/returns")
    page.click("dialog button[type=submit]")
    until(lambda: served.call("GET", "/v1/topics/shop/returns").status == 404, "the end of the topic")
    page.see("shop/orders", "table")


def test_subscription_is_reset_to_prefilled_offsets(page: Page, served: Served) -> None:
    """The dialog has where it stands now; lag follows."""
    page.go(f"{ORDERS}/subscriptions")
    page.click("button", "billing")
    page.click("button", "Reset offsets")
    assert page.evaluate("document.querySelector('dialog input[type=number]').value") == "20"
    page.fill("dialog input[type=number]", "60")
    page.click("dialog button[type=submit]")
    page.wait("document.querySelector('.panel td[data-label=Lag]').innerText === '30'")
    (billing,) = served.ok("GET", "/v1/topics/shop/orders/subscriptions")["subscriptions"]
    assert (billing["partitions"][0]["offset"], billing["lag_messages"]) == (60, 30)
    page.go("#/groups")
    page.see("billing")


def test_garbage_is_planned_reviewed_and_removed(page: Page, served: Served, tmp_path: Path) -> None:
    """The plan names the object and why it can go; it goes after the name of the topic was typed, and no other does."""
    before = {one.name for one in (tmp_path / "store").rglob("*.tlog")}
    page.go(ORDERS)
    page.click("summary", "Upkeep")
    page.click("button", "Plan the removal of orphaned objects")
    page.see("1 object,")
    page.see("data-0-39-e0.tlog")
    assert {one.name for one in (tmp_path / "store").rglob("*.tlog")} == before
    page.click("button", "Review done: apply")
    page.fill("dialog input[type=text]", "shop/orders")
    page.click("dialog button[type=submit]")
    page.see("1 object removed")
    assert before - {one.name for one in (tmp_path / "store").rglob("*.tlog")} == {"data-0-39-e0.tlog"}


def test_verify_run_tells_what_was_read(page: Page) -> None:
    """A run of the disk ends with its verdict, and is listed among the upkeep."""
    page.go("#/upkeep")
    page.fill("select", "topic:shop/orders", "Topic or engine")
    page.wait("[...document.querySelectorAll('option')].some((one) => one.textContent === 'Verify this disk')")
    page.evaluate(
        "(() => { const one = document.querySelector('select[aria-label=\"What to do\"]');"
        " one.value = [...one.options].find((each) => each.text === 'Verify this disk').value; })()"
    )
    page.click("button", "Start")
    page.see("Nothing is wrong.")
    page.go("#/upkeep")
    page.see("Verify", "td")


def test_engine_is_read_as_of_any_seq(page: Page) -> None:
    """The slider goes back: objects, their values and what did not exist yet are those of that seq."""
    page.go("#/engines")
    page.click("a", "main")
    page.see("cat-0")
    page.gone("cat-1", "table")
    page.click("button", "cat-2")
    page.see("version 38", "pre")
    page.fill("input[type=range]", "9")
    page.see("version 6", "pre")
    page.see("cat-1", "table")
    page.wait("document.querySelector('.timeline text').textContent === 'as of 9'")
    page.click("button", "Now")
    page.see("version 38", "pre")


def test_read_only_mode_hides_payloads_and_changes(page: Page) -> None:
    """Nothing of a message is in the page, and no button that changes anything."""
    page.go(ORDERS)
    page.wait(f"{FIRST_ROW}.includes('order')")
    page.click("button", "Read and write")
    page.see("•••", "td.value")
    shown = page.evaluate("document.body.innerText")
    for word in ("sku", "customer-", "Produce", "Purge", "Delete…"):
        assert word not in shown


def test_hostile_content_stays_text(page: Page, served: Served) -> None:
    """Markup in values, keys and names is shown as it is: nothing of it becomes part of the page."""
    bad = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    body = {"messages": [{"value": bad, "key": bad, "headers": {bad: bad}}]}
    served.ok("POST", "/v1/topics/audit/empty/messages", body)
    page.go("#/topics/audit/empty")
    page.click("table.messages tr.pick")
    page.see("onerror", "pre")
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.title").startswith("audit/empty")


def test_theme_follows_the_system_and_the_switch(page: Page) -> None:
    """Dark where the system is dark, and what the reader chose wins."""
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.prefer(dark=True)
    page.wait(f"{background} !== '{light}'")
    page.fill("select", "light", "Theme")
    page.wait(f"{background} === '{light}'")


def test_pages_fit_a_phone(browser: Chromium, served: Served) -> None:
    """At 390 px nothing is cut off to the right, and everything that can be pressed has a name."""
    pages = [
        "#/",
        ORDERS,
        "#/topics/shop/clicks/partitions",
        f"{ORDERS}/settings",
        "#/groups",
        "#/engines/main",
        "#/upkeep",
    ]
    nameless = (
        "[...document.querySelectorAll('a, button, input, select, textarea')]"
        ".filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.closest('label')))"
        ".map((one) => one.outerHTML)"
    )
    with browser.page(f"http://127.0.0.1:{served.address.port}/", 390, 844) as page:
        for hash_ in pages:
            page.evaluate("document.querySelector('main').replaceChildren()")
            page.go(hash_)
            page.wait("document.querySelector('main h1') !== null && !document.body.innerText.includes('Loading')")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, hash_
            assert page.evaluate(nameless) == [], hash_
        assert page.complaints() == []


def test_shown_tab_is_in_view_on_a_phone(browser: Chromium, served: Served) -> None:
    """Loss prevented: on the page of the last tab none of the tabs that were in view was the one that is shown."""
    with browser.page(f"http://127.0.0.1:{served.address.port}/", 390, 760) as page:
        page.go(f"{ORDERS}/settings")
        page.wait("document.querySelector('.tabs [aria-current]')?.getBoundingClientRect().right <= innerWidth")


def test_partitions_fit_a_laptop(browser: Chromium, served: Served) -> None:
    """All columns are seen without scrolling, and numbers stand below the names of their columns."""
    with browser.page(f"http://127.0.0.1:{served.address.port}/", 1200, 760) as page:
        page.go(f"{ORDERS}/partitions")
        page.see("Epoch")
        page.wait("[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)")


def test_missing_topic_leads_back_to_the_others(page: Page) -> None:
    """Who follows an old link is told so, without requests to make by hand."""
    page.go("#/topics/no/such")
    page.see("there is no topic no/such")
    page.gone("GET")
    page.click("main a", "All topics")
    page.see("shop/orders")


def test_token_is_asked_for_and_used(browser: Chromium, tmp_path: Path) -> None:
    """A server with authentication: the page asks, refuses a wrong token, and opens with the right one."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/secret").append(b"hush", sync=True)
        change_accounts(log, granting(grant("root admin *")))
        new, token = make_token("root", 0)
        change_accounts(log, adding_token(new.id, token))
    security = Security(ServeSettings(auth="required", auth_reload_seconds=3600))
    security._failures.failed = lambda client, name: 0.0  # type: ignore[method-assign]
    with (
        serving(tmp_path / "data", security=security) as served,
        browser.page(f"http://127.0.0.1:{served.address.port}/") as page,
    ):
        page.see("A token is needed")
        page.fill("dialog input", "wrong")
        page.click("dialog button[type=submit]")
        page.wait("document.querySelector('dialog input')?.value === ''")
        page.fill("dialog input", new.text)
        page.click("dialog button[type=submit]")
        page.see("shop/secret")
        page.click("button", "Forget token")
        page.see("A token is needed")
        assert page.complaints() == []


def test_dead_letters_are_listed_and_discarded(page: Page, served: Served) -> None:
    """They are read when they are asked for; what is discarded is not listed any more, and stays in the topic."""
    served.produce("audit/empty", "a letter")
    page.go("#/topics/audit/empty/letters")
    page.click("button", "List open letters")
    page.see("a letter", "td.value")
    page.click("main button", "Discard")
    page.click("dialog button[type=submit]")
    page.see("No open letters")
    assert [one["value"] for one in read(served, "audit/empty")] == ["a letter"]
    assert served.ok("GET", "/v1/topics/audit/empty/dead-letters")["letters"] == []
