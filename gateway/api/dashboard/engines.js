"use strict";
// The upstreams that are Keepgate's engine: batch, KV blocks, tokens a second, and the tiers of their prefix stores.

const KEPT = 360;
const TIERS = { device: "device (KV blocks)", memory: "host memory", disk: "disk", mooncake: "Mooncake (remote)", peers: "other engines (by Redis)" };
const course = { time: [], prefill: [], decode: [], running: [], waiting: [] };

const hasEngines = () => course.time.length > 0;

function showEngines(list) {
  const found = list.data.filter(each => each.engine);
  fill("engines-body", found.map(({ upstream, engine }) => {
    const { batch, kv_blocks: blocks, tokens, prefix_cache: prefix } = engine;
    const asked = prefix.tokens_asked;
    return [
      engine.alive ? stacked(upstream, `${engine.model}, ${engine.runner}`) : stacked(upstream, "stopped: see its log", "bad"),
      meter(batch.running, batch.max_batch, `${batch.running} of ${batch.max_batch}`, "batch"), count(batch.waiting),
      share(batch.fill), share(batch.padding),
      meter(blocks.held, blocks.total, `${count(blocks.held)} of ${count(blocks.total)}, ${count(blocks.cached)} cached`, "KV blocks"),
      stacked(rate(tokens.prefill_per_second), `${count(tokens.prompt)} in all`), stacked(rate(tokens.decode_per_second), `${count(tokens.generated)} in all`),
      asked ? share(prefix.tokens_found / asked) : "–", count(engine.preemptions),
    ];
  }), list.missing ?? "No upstream is Keepgate's engine. Start the gateway without --upstream for the included one, or name the URL of a `keepgate backend`.");
  const others = list.data.filter(each => !each.engine).map(each => element("li", each.reason, { class: each.state === "away" ? "bad" : "" }));
  get("engines-others").replaceChildren(...others);
  showDrafts(found);
  showTiers(found);
  get("engines-charts").hidden = !found.length;
  if (!found.length) return;
  note(found.map(each => each.engine));
  draw("speed-chart", [["prefill", "--shared"], ["decode", "--exact"]], [course.time, course.prefill, course.decode], rate, { points: true });
  draw("batch-chart", [["running", "--exact"], ["waiting", "--computed"]], [course.time, course.running, course.waiting], count, { points: true, whole: true });
}

function stacked(above, below, kind = "dim") {
  const cell = element("span", above);
  cell.append(element("br"), element("span", below, { class: kind }));
  return cell;
}

// Of all engines together; the gateway keeps no history of them, so it begins when the page is opened.
function note(engines) {
  const sum = read => engines.reduce((total, engine) => total + read(engine), 0);
  course.time.push(Math.floor(Date.now() / 1000));
  course.prefill.push(sum(engine => engine.tokens.prefill_per_second));
  course.decode.push(sum(engine => engine.tokens.decode_per_second));
  course.running.push(sum(engine => engine.batch.running));
  course.waiting.push(sum(engine => engine.batch.waiting));
  if (course.time.length > KEPT) for (const values of Object.values(course)) values.shift();
}

function showDrafts(found) {
  const rows = found.flatMap(({ upstream, engine }) => Object.entries(engine.drafts).map(([method, drafts]) => [
    upstream, method, count(drafts.drafts), count(drafts.proposed_tokens),
    meter(drafts.accepted_tokens, drafts.proposed_tokens, `${count(drafts.accepted_tokens)} (${share(drafts.accepted_tokens / drafts.proposed_tokens)})`, "accepted tokens"),
    `${drafts.speedup.toFixed(2)} ×`,
  ]));
  fill("drafts-body", rows, "No step has verified a draft yet: nothing was proposed, or a draft would not have paid.");
}

function showTiers(found) {
  const rows = found.flatMap(({ upstream, engine }) => Object.entries(tiersOf(engine)).map(([name, tier]) => {
    const lookups = tier.hits === undefined ? null : tier.hits + tier.misses;
    const stored = tier.bytes ?? null;
    return [
      upstream, TIERS[name] ?? name, tier.blocks === undefined || tier.blocks === null ? "–" : count(tier.blocks),
      tier.capacity_bytes ? meter(stored ?? 0, tier.capacity_bytes, `${size(stored ?? 0)} of ${size(tier.capacity_bytes)}`, "bytes") : stored === null ? "–" : size(stored),
      lookups === null ? "–" : count(lookups), tier.hits === undefined ? "–" : count(tier.hits),
      lookups ? share(tier.hits / lookups) : "–", `${count(tier.tokens_saved)} tokens`,
      tier.bytes_read === undefined ? "–" : size(tier.bytes_read),
      tier.gigabytes_per_second ? `${tier.gigabytes_per_second.toFixed(1)} GB/s` : "–", tier.evictions === undefined ? "–" : count(tier.evictions),
    ];
  }));
  fill("tiers-body", rows, "No engine, so no tiers: see above.");
  const notes = found.flatMap(({ upstream, engine }) => {
    if (!engine.prefix_store) return [element("li", `${upstream} keeps no prefixes beyond its own memory. Set backend.prefix_memory or backend.prefix_disk, or start its keepgate backend with --prefix-memory or --prefix-disk.`)];
    if (engine.prefix_store.index && !engine.prefix_store.index.well) return [element("li", `${upstream}: the index in Redis does not answer, so the blocks of other engines are not found.`, { class: "bad" })];
    return engine.prefix_store.index ? [] : [element("li", `${upstream} shares its blocks with no other engine. Set backend.prefix_index to the URL of a Redis.`)];
  });
  get("tiers-notes").replaceChildren(...notes);
}

// The engine's own memory is the first tier, also without a store. It is asked for tokens, which are shown as blocks.
function tiersOf(engine) {
  const { kv_blocks: { held, cached, total, tokens_per_block, bytes_per_block }, prefix_cache: prefix } = engine;
  const stored = engine.prefix_store?.tiers ?? {}, saved = stored.device?.tokens_saved ?? prefix.tokens_found;
  const device = {
    blocks: held + cached, bytes: (held + cached) * bytes_per_block, capacity_bytes: total * bytes_per_block, tokens_saved: saved,
    hits: Math.round(saved / tokens_per_block), misses: Math.max(0, Math.floor(prefix.tokens_asked / tokens_per_block) - Math.round(saved / tokens_per_block)),
  };
  return { ...stored, device };
}
