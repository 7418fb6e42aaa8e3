// Draws stats.json, every two seconds while somebody looks. Text goes in as text, never as markup.

const EVERY_MS = 2000;
const ADVICE = {
  "never stored": "Nobody stored it since the cache was opened; or with other weights, model or salt.",
  "evicted": "Others needed its room: a larger tier, or one more.",
  "dropped": "A store did not keep it: see what was dropped, and why.",
  "not admitted": "Not used often enough for a tier with admit_after.",
  "removed": "A call removed it.",
  "expired": "It was there for longer than ttl_s.",
  "corrupt": "It was broken, and was deleted: look at the disk.",
  "failed": "Its tier could not write it: see Trouble.",
  "unreadable": "Its tier could not read it: see Trouble.",
  "gone when read": "It was there when it was looked for, and evicted or deleted before it was read.",
  "refused": "It is whole, and sealed by a key that its tier lacks, or not at all: see Trouble.",
  "tier away": "It may be in a tier that is bypassed: see Trouble.",
  "timeout": "The tier was late: see Trouble.",
  "deadline": "The load's time was up.",
  "revoked": "Whoever asked for it gave up.",
  "not in time": "It was on its way.",
  "epoch advanced": "The weights changed while it was loaded.",
};
const $ = (id) => document.getElementById(id);
const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
const sorted = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]);
const number = (n) => Math.round(n).toLocaleString("en");
const percent = (part) => part === null || !isFinite(part) ? "–" : `${(100 * part).toFixed(part > 0 && part < .1 ? 1 : 0)} %`;
const css = (at) => `c${at % 6}`;

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const at = n >= 1 ? Math.min(units.length - 1, Math.floor(Math.log2(n) / 10)) : 0;
  const value = n / 1024 ** at;
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

function span(seconds) {
  for (const [unit, each] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * each) return `${Math.floor(seconds / each)} ${unit}`;
  }
  return seconds >= 1 ? `${Math.round(seconds)} s` : seconds >= .001 ? `${Number((1000 * seconds).toPrecision(2))} ms` : `${Math.round(1e6 * seconds)} µs`;
}

function make(name, attributes = {}, ...children) {
  const inSVG = ["svg", "g", "rect", "line", "path", "text", "circle", "title", "clipPath", "polygon"].includes(name);
  const made = inSVG ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((each) => each instanceof Node ? each : String(each)));
  return made;
}

const put = (id, ...children) => $(id).replaceChildren(...children);
const nothing = (text) => make("p", {class: "nothing"}, text);
const label = (x, y, text, kind = "", anchor = "middle") => make("text", {x, y, class: kind, "text-anchor": anchor}, text);

function table(columns, rows) {
  const cell = (tag) => (text, at) => make(tag, columns[at][1] ? {class: columns[at][1]} : {}, text);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name], at) => cell("th")(name, at)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td"))))));
}

function header(now) {
  const away = now.tiers.filter((tier) => tier.is_bypassed || tier.open_breakers.length);
  document.title = `${now.model} – tiered_kv`;
  $("model").textContent = now.model;
  $("about").textContent = `tiered_kv ${now.version}, open for ${span(now.at - now.opened_at)}`;
  if (!now.cache.is_device_usable) say("The engine's device has failed", "bad");
  else if (away.length) say(`Trouble in ${away.map((tier) => tier.tier).join(", ")}`, "bad");
  else if (now.lag_s > .9) say("The event loop is busy: shown is what was", "bad");
  else if (isUnused(now)) say("Nobody has asked yet", "");
  else say(now.troubles.some((each) => each.at > now.at - 3600) ? "Well again" : "All well", "good");
}

const isUnused = (now) => !now.asked.requested && !now.cache.requested && !now.cache.store_requested;

function say(words, kind) {
  $("state").textContent = words;
  $("state").className = `pill ${kind}`;
}

function figures(now) {
  const {hour} = now, hits = sum(hour.hits), perBlock = now.tokens_per_block;
  const all = [
    [percent(hour.hit_rate), "hit rate, last hour"],
    [number(hour.requested), "blocks asked for"],
    [number(perBlock ? hits * perBlock : hits), perBlock ? "tokens not computed again" : "blocks not computed again"],
    [edge(now.load_s, "p50"), now.load_s.count ? `half of all loads; 99 % ${edge(now.load_s, "p99")}` : "a load"],
    [bytes(sum(hour.bytes_read) + sum(hour.bytes_written)), "to and from storage"],
    [number(now.cache.transfers), "transfers under way"],
  ];
  if (now.prefill_saved_s) all.splice(3, 0, [span(now.prefill_saved_s), "of prefill saved, since opening"]);
  put("figures", ...all.map(([value, what]) => make("div", {class: "figure"}, make("b", {}, value), make("span", {}, what))));
}

// Loads are counted by ranges of time: what is known of one is the edge of its range.
const edge = (times, part) => !times.count ? "–" : times[part] ? `≤ ${span(times[part])}` : `> ${span(times.most)}`;

function chain(now) {
  const isNarrow = $("chain").clientWidth < 620, hits = sum(now.hour.hits), many = now.tiers.length;
  const wide = isNarrow ? 340 : Math.max(620, $("chain").clientWidth);
  const gap = isNarrow ? 30 : 64, engine = isNarrow ? 44 : 92;
  const boxW = isNarrow ? wide : Math.min(330, (wide - engine - many * gap) / many), boxH = isNarrow ? 92 : 128;
  const high = isNarrow ? engine + many * (boxH + gap) : boxH;
  const drawn = make("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "The chain of tiers"});
  drawn.append(
    make("rect", {x: .5, y: isNarrow ? .5 : 34, width: isNarrow ? wide - 1 : engine, height: isNarrow ? engine : boxH - 68, rx: 10, class: "box"}),
    label(isNarrow ? wide / 2 : engine / 2, isNarrow ? 27 : boxH / 2 + 5, "engine", "strong"));
  now.tiers.forEach((tier, at) => {
    const x = isNarrow ? 0 : engine + gap + at * (boxW + gap), y = isNarrow ? engine + gap + at * (boxH + gap) : 0;
    const fill = tier.num_slots ? tier.ready / tier.num_slots : 0, isOff = tier.is_bypassed || tier.open_breakers.length;
    const share = hits ? now.hour.hits[tier.tier] / hits : null;
    const arrow = make("g");
    if (isNarrow) {
      arrow.append(make("path", {class: "flow", "stroke-width": 2, d: `M${wide / 2} ${y - gap + 4} V${y - 4}`}),
        make("polygon", {class: "tip", points: `${wide / 2 - 5},${y - gap + 10} ${wide / 2 + 5},${y - gap + 10} ${wide / 2},${y - gap + 2}`}),
        make("polygon", {class: "tip", points: `${wide / 2 - 5},${y - 10} ${wide / 2 + 5},${y - 10} ${wide / 2},${y - 2}`}));
    } else {
      const middle = y + boxH / 2;
      arrow.append(make("path", {class: "flow", "stroke-width": 2, d: `M${x - gap + 10} ${middle} H${x - 10}`}),
        make("polygon", {class: "tip", points: `${x - gap + 14},${middle - 5} ${x - gap + 14},${middle + 5} ${x - gap + 5},${middle}`}),
        make("polygon", {class: "tip", points: `${x - 14},${middle - 5} ${x - 14},${middle + 5} ${x - 5},${middle}`}));
    }
    const clip = `clip${at}`;
    const box = {x: x + .5, y: y + .5, width: boxW - 1, height: boxH - 1, rx: 10};
    const level = isNarrow ? {x, y, width: boxW * fill, height: boxH} : {x, y: y + boxH * (1 - fill), width: boxW, height: boxH * fill};
    const size = tier.num_slots ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}` : "shared with others";
    const facts = [tier.num_slots ? `${percent(fill)} full, ${number(tier.ready)} blocks` : `${number(tier.written)} blocks written`];
    drawn.append(arrow, make("clipPath", {id: clip}, make("rect", box)), make("rect", {...box, class: `box ${isOff ? "off" : ""}`}),
      make("rect", {...level, class: css(at), opacity: .3, "clip-path": `url(#${clip})`}),
      make("rect", {x: x + 14, y: y + 16, width: 10, height: 10, rx: 2, class: css(at)}),
      label(x + 31, y + 26, tier.tier, "strong", "start"),
      label(x + 14, y + 50, size, "", "start"), label(x + 14, y + 69, facts[0], "quiet", "start"));
    if (!isNarrow) drawn.append(label(x + 14, y + boxH - 30, flow(tier), "quiet", "start"));
    if (isOff) drawn.append(label(x + boxW - 14, y + 26, tier.open_breakers.length ? `no ${tier.open_breakers.join(", ")}` : "bypassed", "bad", "end"));
    const said = share === null ? "no hits yet" : `${percent(share)} of hits`;
    drawn.append(isNarrow ? label(x + boxW - 14, y + 50, said, "strong", "end") : label(x + 14, y + boxH - 11, said, "strong", "start"));
  });
  put("chain", drawn);
}

function flow(tier) {
  if (tier.num_waiting) return `${tier.num_calls} calls, ${tier.num_waiting} wait`;
  if (tier.in_flight_bytes) return `${bytes(tier.in_flight_bytes)} in flight`;
  return tier.leased ? `${number(tier.leased)} blocks in use` : "";
}

function sources(now) {
  const wide = Math.max(320, $("sources").clientWidth), high = 170, left = 44, foot = 22, names = now.tiers.map((tier) => tier.tier);
  const start = now.parts.length ? now.parts[0].start : now.at, length = Math.max(now.at - start, 1);
  const most = Math.max(...now.parts.map((part) => (sum(part.hits) + part.missing) / (part.stop - part.start)), 0);
  if (!most) return put("sources", nothing("Nothing was asked for yet.")), put("legend");
  const drawn = make("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Blocks a second, by the tier that had them"});
  const top = 10, plot = high - foot - top, x = (at) => left + (wide - left) * (at - start) / length;
  for (const part of [0, .5, 1]) {
    const y = top + plot * (1 - part);
    drawn.append(make("line", {x1: left, x2: wide, y1: y, y2: y, class: "grid"}),
      label(left - 8, y + 4, most * part >= 10 ? number(most * part) : (most * part).toPrecision(2).replace(/\.0$/, ""), "quiet", "end"));
  }
  for (const part of now.parts) {
    let base = top + plot;
    const seconds = part.stop - part.start, from = x(part.start), width = Math.max(1, x(part.stop) - from - 1);
    const bar = make("g", {}, make("title", {}, [`${clock.format(1000 * part.stop)}, hit rate ${percent(part.hit_rate)}`,
      ...names.map((name) => `${name}: ${number(part.hits[name])}`), `missed: ${number(part.missing)}`].join("\n")));
    [...names.map((name, at) => [part.hits[name], css(at)]), [part.missing, "cm"]].forEach(([count, kind]) => {
      const height = plot * count / seconds / most;
      base -= height;
      if (height) bar.append(make("rect", {x: from, y: base, width, height, class: kind}));
    });
    drawn.append(bar);
  }
  drawn.append(label(left, high - 4, `${start <= now.opened_at + 1 && wide > 620 ? "opened " : ""}${clock.format(1000 * start)}`, "quiet", "start"), label(wide, high - 4, clock.format(1000 * now.at), "quiet", "end"),
    label((left + wide) / 2, high - 4, "blocks a second", "quiet"));
  put("sources", drawn);
  const dot = (kind) => make("svg", {viewBox: "0 0 10 10"}, make("rect", {width: 10, height: 10, rx: 2, class: kind}));
  put("legend", ...names.map((name, at) => make("span", {}, dot(css(at)), name)), make("span", {}, dot("cm"), "missed"));
}

function missed(now) {
  const counts = now.hour.missing_because, all = sum(counts), rows = sorted(counts);
  if (!all) return put("missed", nothing(now.hour.requested ? "Nothing was missed." : "Nothing was asked for."));
  put("missed", ...rows.map(([why, n]) => make("div", {class: "because"},
    make("div", {}, make("b", {}, why), make("span", {}, `${number(n)} blocks, ${percent(n / all)}`)),
    make("progress", {value: n / all, max: 1, "aria-label": why}), make("small", {}, ADVICE[why] || ""))));
}

function ghost(now) {
  const points = now.ghost, wide = 460, high = 190, left = 44, foot = 34, top = 14;
  if (!points.length) return put("ghost", nothing("Nothing was asked for yet, or no tier is the cache's own."));
  const x = (at) => left + 26 + (wide - left - 62) * at / (points.length - 1), y = (rate) => top + (high - top - foot) * (1 - rate);
  const drawn = make("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Hit rate by size"});
  for (const rate of [0, .5, 1]) drawn.append(make("line", {x1: left, x2: wide, y1: y(rate), y2: y(rate), class: "grid"}), label(left - 8, y(rate) + 4, percent(rate), "quiet", "end"));
  drawn.append(make("path", {class: "curve", d: points.map((point, at) => `${at ? "L" : "M"}${x(at)} ${y(point.hit_rate)}`).join(" ")}));
  points.forEach((point, at) => {
    const isNow = point.size === 1;
    drawn.append(make("circle", {cx: x(at), cy: y(point.hit_rate), r: isNow ? 6 : 4, class: isNow ? "c2" : "c0"}),
      label(x(at), y(point.hit_rate) + (point.hit_rate > .85 ? 20 : -11), percent(point.hit_rate), isNow ? "strong" : ""),
      label(x(at), high - 17, bytes(point.capacity_bytes), "quiet"), label(x(at), high - 2, isNow ? "now" : `× ${point.size}`, isNow ? "strong" : "quiet"));
  });
  const {requested, part, tier} = now.ghost_of, sampled = part < 1 ? `, of one block in ${number(1 / part)}` : "";
  put("ghost", drawn, make("p", {class: "nothing"}, make("small", {}, `${number(requested)} uses${sampled}, as LRU caches of 1/4 to 4 times ${tier}, the largest tier, would have served them. While nobody looks only the latest uses are remembered. Points are measured, lines between them are not.`)));
}

function moving(now) {
  const {cache} = now, rows = now.tiers.filter((tier) => tier.num_calls || tier.num_waiting || tier.in_flight_bytes || tier.dirty)
    .map((tier) => [tier.tier, number(tier.num_calls), number(tier.num_waiting), bytes(tier.in_flight_bytes), number(tier.dirty)]);
  const whole = [["transfers", number(cache.transfers)], ["waits to be stored", bytes(cache.store_queue_bytes)],
    ["passing through memory", `${number(cache.bounce_slots - cache.bounce_free)} of ${number(cache.bounce_slots)} slots`], ["pinned", bytes(cache.pinned_bytes)]];
  put("moving", table([["the cache"], ["", "number"]], whole),
    ...rows.length ? [table([["tier"], ["calls", "number"], ["wait", "number"], ["in flight", "number"], ["to write down", "number"]], rows)] : []);
}

function gone(now) {
  const {hour} = now, why = sorted(hour.dropped_because).map(([reason, n]) => [reason, number(n)]);
  const rows = now.tiers.map((tier) => {
    const reasons = hour.not_written[tier.tier];
    return [tier.tier, number(hour.evicted[tier.tier]), number(sum(reasons)), sorted(reasons).map(([reason, n]) => `${reason} ${number(n)}`).join(", ")];
  });
  const kept = now.cache.store_requested ? "What stores were given is in one tier or another." : "Nothing was stored yet.";
  put("gone", table([["tier"], ["evicted", "number"], ["not written", "number"], ["why", "told"]], rows),
    why.length ? table([["kept in no tier"], ["blocks", "number"]], why) : nothing(kept));
}

function shortfalls(now) {
  const rows = now.shortfalls.slice(0, 8).map((each) => [clock.format(1000 * each.at), number(each.tokens), each.tenant.slice(0, 8), `${number(each.found)} of ${number(each.requested)}`, each.because]);
  const none = now.asked.requested ? "Every prompt was there to its end." : "Nothing was asked for yet.";
  put("shortfalls", rows.length ? table([["at"], ["tokens", "number"], ["tenant"], ["blocks", "number"], ["the next one was"]], rows) : nothing(none),
    ...rows.length ? [nothing("tiered-kv explain says it block by block.")] : []);
}

function trouble(now) {
  const open = now.tiers.flatMap((tier) => [...tier.open_breakers.map((calls) => [tier.tier, `no ${calls}`, "now", ""]),
    ...tier.is_bypassed && !tier.open_breakers.length ? [[tier.tier, "bypassed", "now", ""]] : []]);
  const times = (n) => n === 1 ? "once" : `${number(n)} times`;
  const rows = [...open, ...now.troubles.map((each) => [each.tier, `${each.call} ${each.what}, ${times(each.times)}`, clock.format(1000 * each.at), each.error])];
  const isOld = !open.length && !now.troubles.some((each) => each.at > now.at - 3600);
  $("trouble").parentElement.classList.toggle("calm", isOld);
  put("trouble", rows.length ? table([["tier"], ["what"], ["last"], ["as it was told", "told"]], rows) : nothing("No call of a tier failed or was late since the cache was opened."));
}

let shown = null;

function draw() {
  if (shown === null) return;
  document.querySelector("main").hidden = false;
  for (const part of [header, figures, chain, sources, missed, ghost, moving, gone, shortfalls, trouble]) part(shown);
}

async function look() {
  try {
    const answer = await fetch("stats.json", {cache: "no-store", signal: AbortSignal.timeout(5000)});
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.error);
    shown = said;
    draw();
  } catch (error) {
    say(shown ? `No answer since ${clock.format(1000 * shown.at)}` : error.message || "No answer", "bad");
  }
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, EVERY_MS);
}

addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => document.hidden || look());
follow();
