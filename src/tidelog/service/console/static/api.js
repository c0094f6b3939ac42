// The public HTTP API of this node, and nothing else: what another node of a cluster has, this one asks it for. A token is asked for when the server wants one, and lives as long as the tab.

const STAY = { "x-tidelog-redirect": "no" }; // the policy of the page allows requests to this node only
const TOKEN = "tidelog-token";
let asking = null;
let askToken = async () => null;

/** Sets what asks a person for a token: a function of a message that returns it, or null. */
export function onTokenNeeded(ask) {
  askToken = ask;
}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;
export const forgetToken = () => sessionStorage.removeItem(TOKEN);

/** What the server said when it refused: `error` is the class, `hint` the fix. */
export class Problem extends Error {
  constructor(status, document, headers = new Headers()) {
    super(document.detail || document.title || `the server answered ${status}`);
    this.status = status;
    this.node = headers.get("x-tidelog-node") || "";
    const at = headers.get("x-tidelog-location");
    this.place = at ? new URL(`/${window.location.hash}`, at).href : ""; // the same page at the node that serves it
    this.error = document.error || "";
    const hint = document.command_hint || document.hint || "";
    this.hint = /^(GET|POST|PUT|PATCH|DELETE) /.test(hint) ? "" : hint; // who sees a page makes no requests
  }
}

function withToken(headers) {
  const token = sessionStorage.getItem(TOKEN);
  return token === null ? headers : { ...headers, authorization: `Bearer ${token}` };
}

async function needToken(message) {
  asking ??= askToken(message).finally(() => {
    asking = null;
  });
  const token = await asking;
  if (token === null) return false;
  sessionStorage.setItem(TOKEN, token);
  return true;
}

function address(path, query) {
  const given = Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

async function open(method, path, { query, body, signal, accept = "application/json" } = {}) {
  for (;;) {
    let response;
    try {
      const headers = withToken(body === undefined ? { accept, ...STAY } : { accept, ...STAY, "content-type": "application/json" });
      const content = body === undefined ? undefined : JSON.stringify(body);
      response = await fetch(address(path, query), { method, headers, body: content, signal, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, { detail: "the server does not answer", hint: "Check that it runs; the page tries again." });
    }
    if (response.ok) return response;
    let document = {};
    try {
      document = await response.json();
    } catch {
      // A proxy may answer otherwise than the server does.
    }
    const problem = new Problem(response.status, document, response.headers);
    if (response.status !== 401 || !(await needToken(problem.message))) throw problem;
  }
}

/** The JSON of an answer; null where there is none. */
export async function api(method, path, options = {}) {
  const response = await open(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** The bytes of an answer, and its headers. */
export async function bytesAt(path, query, signal) {
  const response = await open("GET", path, { query, signal, accept: "application/octet-stream" });
  return { data: new Uint8Array(await response.arrayBuffer()), headers: response.headers };
}

export const get = (path, query, signal) => api("GET", path, { query, signal });

/** Server-sent events as they come: `{event, data}`. (`EventSource` could not send a token.) */
export async function* events(path, query, signal) {
  const response = await open("GET", path, { query, signal, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) found.event = line.slice(7);
        else if (line.startsWith("data: ")) found.data += line.slice(6);
      }
      if (found.data) yield { event: found.event, data: JSON.parse(found.data) };
      else yield { event: "alive", data: null };
    }
  }
}

/** The path of a topic; its name is `namespace/name`. */
export function topicPath(name, ...rest) {
  const [namespace, ...tail] = name.split("/");
  return ["/v1/topics", encodeURIComponent(namespace), encodeURIComponent(tail.join("/")), ...rest].join("/");
}

export const enginePath = (name, ...rest) => ["/v1/engines", encodeURIComponent(name), ...rest].join("/");
export const subscriptionPath = (topic, name, ...rest) =>
  topicPath(topic, "subscriptions", encodeURIComponent(name), ...rest);
