"""The console of a cluster, clicked through in a real Chromium: real nodes, etcd and SeaweedFS as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.browser.chromium import Chromium, Page, until
from tests.cluster.processes import DevCluster
from tests.service.http.serving import Served

import tidelog

LEASE_SECONDS = 12.0
ORDERS, CLICKS, PHOTOS = "shop/orders", "shop/clicks", "photos"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Three nodes with a topic of six partitions, one of a single one that n2 has, and an engine that n3 has."""
    running = DevCluster(tmp_path_factory.mktemp("cluster"), LEASE_SECONDS)
    try:
        seed(running)
        yield running
    finally:
        running.stop()


def seed(running: DevCluster) -> None:
    with tidelog.connect(running.nodes["n1"]["http"]) as server:
        orders = server.topic(ORDERS, partitions=6)
        for number in range(30):
            orders.append(b"order %d" % number, key=b"%d" % number)
        server.topic(CLICKS).append(b"the only click")
    running.operations.add_engine(PHOTOS)
    for request in (
        running.operations.move(CLICKS, 0, "n2", pin=True, by="operator"),
        running.operations.move_engine(PHOTOS, "n3", pin=True),
    ):
        assert running.operations.until(running.operations.is_carried_out(request), 60)
    until(lambda: sum(load.engines for load in running.operations.loads().values()) == 1, "the engine")
    with tidelog.connect(running.nodes["n1"]["http"]) as server:
        engine = server.engine(PHOTOS)
        engine.apply(1, tidelog.CreateBucket("cats"))
        engine.apply(2, tidelog.PutObject("cats", "tom", b"a grey cat"))


@pytest.fixture
def page(browser: Chromium, cluster: DevCluster) -> Iterator[Page]:
    """The console of n1; at the end no script has failed, and the policy has blocked nothing."""
    with browser.page(f"{cluster.nodes['n1']['http']}/") as opened:
        yield opened
        assert opened.complaints() == []


def placed(cluster: DevCluster) -> list[tuple[str, tuple[str | None, ...]]]:
    """The nodes of the partitions of each topic."""
    return [(one.name, one.partitions) for one in cluster.operations.topics()]


def row(table: str, name: str) -> str:
    """The text of a row of a table, as a script."""
    rows = f"document.querySelectorAll('section[aria-label=\"{table}\"] tbody tr')"
    return f"[...{rows}].find((one) => one.dataset.key === '{name}').innerText"


def test_cluster_shows_nodes_owners_and_decisions_with_reasons(page: Page, cluster: DevCluster) -> None:
    """Zone, version, load and the leader of nodes; who serves what; what was decided and why."""
    page.press("g")
    page.press("c")
    page.see("Served")
    leader = cluster.operations.status().leader
    for number, name in enumerate(sorted(cluster.nodes), 1):
        page.wait(f"{row('Nodes', name)}.includes('alive') && {row('Nodes', name)}.includes('z{number}')")
        page.wait(f"{row('Nodes', name)}.includes('{tidelog.__version__}') && {row('Nodes', name)}.includes('MiB')")
        page.wait(f"{row('Nodes', name)}.includes('leader') === {str(name == leader).lower()}")
    page.wait(f"['n1 2', 'n2 2', 'n3 2'].every((one) => {row('Topics', ORDERS)}.includes(one))")
    page.wait(f"{row('Topics', CLICKS)}.includes('n2 1')")
    page.wait(f"{row('Engines', PHOTOS)}.includes('n3')")
    page.see("nobody serves it", 'section[aria-label="Decisions"]')
    page.see(f"{CLICKS}/0", 'section[aria-label="Decisions"]')


def test_restore_point_is_shown_by_node(page: Page, cluster: DevCluster) -> None:
    """What is synced and not shipped, of which topic, on whose disk; entries of an engine, too."""
    with tidelog.connect(cluster.nodes["n1"]["http"]) as server:
        server.topic(CLICKS).append(b"not shipped yet")
    page.go("#/cluster")
    page.wait(f"{row('Restore point', f'n2 {CLICKS}')}.includes('1')")
    page.see("would be lost", ".cards")
    page.wait(f"{row('Restore point', f'n3 engine {PHOTOS}')}.includes('applied again')")


def test_topics_and_engines_of_other_nodes_are_read_at_any_node(page: Page, cluster: DevCluster) -> None:
    """The loss: a browser asks no other host, so what another node serves could not be looked at. What would change
    something says where it is to be done."""
    with tidelog.connect(cluster.nodes["n1"]["http"]) as server:
        server.topic(CLICKS).append(b"at n2")
    page.see("on other nodes")
    page.go(f"#/topics/{CLICKS}")
    page.see("at n2", "td.value")
    page.see("n2, epoch", "dl.facts")
    page.go(f"#/topics/{ORDERS}/partitions")
    page.see("Owner", "th")
    page.go("#/engines")
    page.click("a", PHOTOS)
    page.click("button.link", "tom")
    page.see("a grey cat", "pre")
    page.go(f"#/topics/{CLICKS}")
    page.click("button", "Follow live")
    place = page.wait("document.querySelector('.notice a, .toast a')?.href")
    assert place == f"{cluster.nodes['n2']['http']}/#/topics/{CLICKS}"


def test_node_is_drained_and_a_partition_is_moved_by_clicks(page: Page, cluster: DevCluster) -> None:
    """The plan is shown before; what is drained says so, and can be undone."""
    page.go("#/cluster")
    page.wait(f"{row('Nodes', 'n3')}.includes('alive')")
    page.click('section[aria-label="Nodes"] tr[data-key=n3] button', "Drain…")
    page.see("n3 is drained", "dialog")
    page.click("dialog button[type=submit]")
    page.wait(f"{row('Nodes', 'n3')}.includes('drained')")
    page.wait(f"!{row('Topics', ORDERS)}.includes('n3')")
    page.click('section[aria-label="Nodes"] tr[data-key=n3] button', "Undrain")
    page.wait(f"{row('Nodes', 'n3')}.includes('alive')")
    page.click(f'tr[data-key="{ORDERS}"] button')
    page.fill("dialog input[type=number]", "4")
    page.fill("dialog select", "n3")
    page.click("dialog button[type=submit]")
    until(lambda: dict(placed(cluster))[ORDERS][4] == "n3", "the move")
    page.wait(f"{row('Topics', ORDERS)}.includes('n3')")


def test_what_a_dead_node_had_not_shipped_is_said(page: Page, cluster: DevCluster) -> None:
    """Not only before it dies: how much is missing, and on which disk it is."""
    operations = cluster.operations
    with tidelog.connect(cluster.nodes["n1"]["http"]) as server:
        server.topic(CLICKS).append(b"only on the disk of n2")
    until(lambda: any(one.node == "n2" and one.topic == CLICKS for one in operations.restore_point()), "the report")
    cluster.kill("n2")
    page.go("#/cluster")
    page.wait(f"{row('Nodes', 'n2')}.includes('gone')")
    page.wait(f"{row('Restore point', f'n2 {CLICKS}')}.includes('gone')")
    page.see("that n2 had not shipped", ".card.bad")
    cluster.start("n2")
    page.wait(f"{row('Nodes', 'n2')}.includes('alive')")
    page.gone("that n2 had not shipped")


def test_node_by_itself_says_that_it_has_no_cluster(browser: Chromium, served: Served) -> None:
    """And how to have one."""
    with browser.page(f"http://127.0.0.1:{served.address.port}/#/cluster") as page:
        page.see("This node is by itself")
        page.gone("there is no cluster")
