// Subscriptions and consumer groups of all topics that are open.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { standing } from "./overview.js";
import { subscriptionsPart } from "./subscriptions.js";

const MOST_TOPICS = 100;

export async function groups(context) {
  const { main, signal } = context;
  document.title = "Groups – tidelog";
  const says = h("p", { class: "muted" });

  /** Those that are open: asking for the groups of another one would open it. */
  async function openTopics() {
    const { topics, next } = await get("/v1/topics", { standing: true, limit: 1000 }, signal);
    const open = topics.filter((one) => standing(one)?.isComplete).map((one) => one.name);
    const parts = [];
    if (open.length < topics.length) parts.push(`${topics.length - open.length} topics were not used since the server started, and are not asked.`);
    if (open.length > MOST_TOPICS || next) parts.push(`Only the first ${MOST_TOPICS} open topics are shown; a topic's own page has its groups.`);
    fill(says, parts.join(" "));
    return open.slice(0, MOST_TOPICS);
  }

  fill(main, h("div", { class: "title" }, h("h1", {}, "Subscriptions and groups")), subscriptionsPart(context, openTopics, { withTopic: true }), says);
}
