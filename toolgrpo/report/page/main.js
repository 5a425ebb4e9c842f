// The frame: navigation, addresses, keys, colours, and following a live run.

const VIEWS = {
  overview: ["Overview", (parts, wanted) => overview(wanted)],
  groups: ["Groups", (parts, wanted) => groupsView(wanted)],
  find: ["Find", (parts, wanted) => findView(wanted)],
  compare: ["Compare", (parts, wanted) => compareView(wanted)],
  reinforced: ["Reinforced", (parts, wanted) => reinforcedView(wanted)],
  timeline: ["Timeline", (parts, wanted) => timelineView(wanted)],
  findings: ["Findings", (parts, wanted) => findingsView(wanted)],
  group: [null, groupView, "groups"],
  episode: [null, episodeView, "groups"],
};

const KEYS = [
  ["1 … 7", "go to a view"],
  ["/", "search"],
  ["j, k", "next and previous group, episode or step"],
  ["t", "conversation or tokens"],
  ["← →", "values of a chart, tokens of an episode"],
  ["?", "this list"],
];

const app = document.getElementById("app");
const main = h("main", { id: "main", tabindex: "-1" });
const help = h("dialog.help", { "aria-label": "Keys" }, h("h2", {}, "Keys"), lines(KEYS), h("form", { method: "dialog" }, h("button.button", {}, "Close")));
const tabs = h("nav.tabs", { "aria-label": "Views" });
const news = h("p.news", { role: "status", hidden: true });

function frame() {
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name][0]);
  fill(tabs, names.map((name, place) => h("a", { href: link(name), "data-view": name, "data-place": place + 1 }, VIEWS[name][0], name === "findings" && REPORT.runs.some((run) => run.findings.length) ? h("span.dot", {}, String(REPORT.runs.reduce((sum, run) => sum + run.findings.length, 0))) : null)));
  const skip = h("a.skip", { href: "#/", onclick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to the content");
  const scheme = h("button.icon", { type: "button", title: "Light or dark", "aria-label": "Light or dark", onclick: switchScheme }, "◐");
  const keys = h("button.icon", { type: "button", title: "Keys", "aria-label": "Keys", onclick: () => help.showModal() }, "?");
  fill(app, skip, h("header.top", {}, h("a.mark", { href: link("overview") }, "toolgrpo"), tabs, h("span.tools", {}, scheme, keys)), news, main, note, help);
}

let drawing = 0;

async function draw() {
  const { path, wanted } = route();
  const [name, ...parts] = path.length ? path : ["overview"];
  const [, view, under] = VIEWS[name] || VIEWS.overview;
  const mine = ++drawing;
  const focused = document.activeElement && document.activeElement.id;
  const [start, end] = focused ? [document.activeElement.selectionStart, document.activeElement.selectionEnd] : [];
  hideNote();
  for (const tab of tabs.children) {
    if (tab.dataset.view === (under || name)) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  const current = tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft - tabs.clientWidth / 2 + current.offsetWidth / 2;
  let content;
  try {
    content = await view(parts, wanted);
  } catch (error) {
    content = [h("h1", {}, "This cannot be shown"), h("p", {}, `${error.name}: ${error.message}`)];
    console.error(error);
  }
  if (mine !== drawing) return; // a later address came first
  const sameView = main.dataset.view === path.slice(0, 3).join("/");
  const height = scrollY;
  fill(main, content);
  main.dataset.view = path.slice(0, 3).join("/");
  document.title = `${main.querySelector("h1")?.textContent || "report"} · toolgrpo report`;
  scrollTo(0, sameView ? height : 0);
  const again = focused && document.getElementById(focused);
  if (again) {
    again.focus();
    if (start !== null && start !== undefined) again.setSelectionRange(start, end);
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
  const { path, wanted } = route();
  const view = tabs.querySelector(`[data-place="${event.key}"]`);
  if (view) location.hash = view.getAttribute("href");
  else if (event.key === "?") help.showModal();
  else if (event.key === "/") {
    const field = main.querySelector("input[type=search]");
    if (field) field.focus();
    else location.hash = link("find");
  } else if (event.key === "t" && path[0] === "episode") go(path.join("/"), { ...wanted, view: wanted.view === "tokens" ? "chat" : "tokens" }, { replace: true });
  else if (event.key === "j" || event.key === "k") {
    const step = main.querySelector(`[data-key="${event.key}"]`);
    if (step) location.hash = step.getAttribute("href");
  } else return;
  event.preventDefault();
}

function switchScheme() {
  const dark = document.documentElement.dataset.scheme ? document.documentElement.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.scheme = dark ? "light" : "dark";
  try {
    localStorage.setItem("toolgrpo-scheme", document.documentElement.dataset.scheme);
  } catch {
    // a file:// page may have no storage
  }
}

// A live report asks its server whether the run has gone on, and offers (or, on the overview, takes) what is new.
function follow() {
  let known = REPORT.live;
  setInterval(async () => {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      const { state } = await answer.json();
      if (state !== known) {
        if ((route().path[0] || "overview") === "overview" && !document.hidden) location.reload();
        else {
          fill(news, "The run has continued. ", h("button.button", { type: "button", onclick: () => location.reload() }, "Show the new data"));
          news.hidden = false;
        }
      } else news.hidden = true;
    } catch {
      fill(news, "The server of this live report no longer answers; the page stays as it is.");
      news.hidden = false;
    }
  }, 3000);
}

async function begin() {
  try {
    document.documentElement.dataset.scheme = localStorage.getItem("toolgrpo-scheme") || "";
  } catch {
    // no storage
  }
  if (!document.documentElement.dataset.scheme) delete document.documentElement.dataset.scheme;
  if (typeof DecompressionStream === "undefined") {
    fill(app, h("p", {}, "This browser is too old for the report: it has no DecompressionStream. Use a browser of 2023 or later."));
    return;
  }
  await openReport();
  frame();
  addEventListener("hashchange", draw);
  addEventListener("keydown", onKey);
  addEventListener("scroll", hideNote, { passive: true });
  await draw();
  document.documentElement.dataset.ready = "yes";
  if (REPORT.live) follow();
  // The texts are read ahead while nobody waits, so that the first search finds them.
  const chunks = [...REPORT.chunks.keys()];
  const ahead = async () => {
    for (const chunk of chunks.splice(0, 2)) await searchTexts(chunk);
    if (chunks.length) (window.requestIdleCallback || setTimeout)(ahead);
    else document.documentElement.dataset.searchable = "yes";
  };
  (window.requestIdleCallback || setTimeout)(ahead);
}

begin().catch((error) => {
  fill(app, h("p", {}, `The report cannot be read: ${error.message}`));
  console.error(error);
});
