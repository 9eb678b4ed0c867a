// node check.mjs BASE_URL: drives a worker of preset `tiny` through both encodings.
// Prints one JSON line, the definition of the input rows and the entries read back; exits 1 on a deviation.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { Client, FRAME, KvfoldError, MSGPACK, tensor } from "./client.mjs";

const INPUTS = [
  { compressor: "layers.0.hca", seed: 1, shape: [130, 2 * 512] },
  { compressor: "layers.1.csa", seed: 2, shape: [9, 4 * 512] },
  { compressor: "layers.1.indexer", seed: 3, shape: [9, 4 * 128] },
];
const ENTRIES = { "layers.0.hca": 1, "layers.1.csa": 2, "layers.1.indexer": 2 };

/** Element i is fmix32(seed + i * 0x9e3779b9), its upper 24 bits laid over [-2, 2): exact in float32. */
function pseudoRandom(seed, count) {
  return Float32Array.from({ length: count }, (_, i) => {
    let h = (seed + Math.imul(i, 0x9e3779b9)) | 0;
    h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
    h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
    h ^= h >>> 16;
    return (h >>> 8) / 2 ** 22 - 2;
  });
}

function inputRows({ seed, shape }) {
  return tensor("fp32", shape, pseudoRandom(seed, shape[0] * shape[1]));
}

function e4m3(byte) {
  const sign = byte & 0x80 ? -1 : 1;
  const exponent = (byte >> 3) & 15;
  const mantissa = byte & 7;
  if (exponent === 15 && mantissa === 7) return NaN;
  return sign * (exponent === 0 ? mantissa * 2 ** -9 : (8 + mantissa) * 2 ** (exponent - 10));
}

function bf16(half) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, half << 16);
  return view.getFloat32(0);
}

const viewOf = ({ data }) => new DataView(data.buffer, data.byteOffset, data.byteLength);

/** 448 e4m3 values in blocks of 64, 64 bf16 values; one power of two a block in the scale area. */
function decodeMla(page, pageEntries, slot) {
  const view = viewOf(page);
  const scaleBytes = page.data.subarray(pageEntries * 576 + slot * 8, pageEntries * 576 + slot * 8 + 8);
  assert.equal(scaleBytes[7], 0);
  const scales = Array.from(scaleBytes.subarray(0, 7), (byte) => 2 ** (byte - 127));
  const at = slot * 576;
  const values = Array.from({ length: 448 }, (_, i) => e4m3(view.getUint8(at + i)) * scales[i >> 6]);
  for (let i = 0; i < 64; i++) values.push(bf16(view.getUint16(at + 448 + 2 * i, true)));
  return { values, scales };
}

/** 128 e4m3 values; one float32 scale in the scale area. */
function decodeIndexer(page, pageEntries, slot) {
  const view = viewOf(page);
  const scale = view.getFloat32(pageEntries * 128 + slot * 4, true);
  const values = Array.from({ length: 128 }, (_, i) => e4m3(view.getUint8(slot * 128 + i)) * scale);
  return { values, scales: [scale] };
}

async function refused(status, code, call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof KvfoldError)) throw error;
    assert.deepEqual([error.status, error.code], [status, code], error.message);
    return error.details;
  }
  assert.fail(`expected ${status} ${code}, the call went through`);
}

const HCA = "layers.0.hca";
const HCA_WIDTH = INPUTS[0].shape[1];
const hcaRows = (numTokens) => tensor("fp32", [numTokens, HCA_WIDTH], new Float32Array(numTokens * HCA_WIDTH));

/** Two steps of one request; returns its pages by compressor. */
async function fill(client, id) {
  const [hca, csa, indexer] = INPUTS;
  const steps = [
    await client.step(`${id}-0`, id, 0, 130, { [hca.compressor]: inputRows(hca) }),
    await client.step(`${id}-1`, id, 0, 9, {
      [csa.compressor]: inputRows(csa),
      [indexer.compressor]: inputRows(indexer),
    }),
  ];
  const stepped = Object.assign({}, ...steps.map((reply) => reply.requests[0].compressors));
  const got = (await client.getRequest(id)).compressors;
  const pages = {};
  for (const { compressor, shape } of INPUTS) {
    const state = stepped[compressor];
    assert.equal(state.committed, shape[0]);
    assert.equal(state.num_entries, ENTRIES[compressor]);
    assert.deepEqual(state.new_entries, [0, ENTRIES[compressor]]);
    assert.equal(state.pages.length, 1);
    const { new_entries: _, ...lasting } = state;
    assert.deepEqual(got[compressor], lasting);

    const [page] = await client.readPages(state.pages);
    assert.equal(page.handle, state.pages[0]);
    assert.equal(page.compressor, compressor);
    assert.equal(page.num_entries, ENTRIES[compressor]);
    assert.equal(page.dtype, "uint8");
    assert.deepEqual(page.shape, [page.data.length]);
    pages[compressor] = page;
  }
  assert.equal(stepped[HCA].open_tokens, 2);
  return pages;
}

async function checkRefusals(client, id, handle) {
  const before = await client.getRequest(id);
  const step = (name, start, numTokens, rows = hcaRows(numTokens)) =>
    client.step(`${id}-${name}`, id, start, numTokens, { [HCA]: rows });

  assert.equal((await refused(409, "position_gap", () => step("gap", 131, 1))).expected, 130);
  await refused(409, "position_conflict", () => step("conflict", 129, 1));
  const unseen = await refused(409, "position_gap", () =>
    client.step(`${id}-unseen`, `${id}-unseen`, 5, 1, { [HCA]: hcaRows(1) }));
  assert.equal(unseen.expected, 0);

  const poisoned = new Float32Array(3 * HCA_WIDTH);
  poisoned[1 * HCA_WIDTH + 529] = NaN;
  const found = await refused(400, "non_finite", () => step("nan", 130, 3, tensor("fp32", [3, HCA_WIDTH], poisoned)));
  assert.deepEqual([found.row, found.column], [1, 529]);

  const forged = handle.slice(0, -1) + (handle.endsWith("A") ? "B" : "A");
  for (const unknown of ["unknown", forged]) {
    await refused(404, "unknown_handle", () => client.readPages([handle, unknown]));
  }
  await refused(404, "unknown_request", () => client.getRequest(`${id}-unseen`));

  const body = client.encode(client.stepBody(`${id}-trailing`, id, 130, 1, { [HCA]: hcaRows(1) }));
  await refused(400, "malformed", () => client.send("POST", "/v1/step", Uint8Array.of(...body, 0)));

  assert.deepEqual(await client.getRequest(id), before);
}

async function checkRelease(client, id, handle) {
  await client.release(id);
  await client.release(id);
  await refused(404, "unknown_request", () => client.getRequest(id));
  await refused(410, "stale_handle", () => client.readPages([handle]));
}

async function main(baseUrl) {
  const msgpack = new Client(baseUrl, MSGPACK);
  const frame = new Client(baseUrl, FRAME);
  const run = randomUUID(); // a step_id sent before is answered as before: take fresh ones
  const ids = [`${run}-msgpack`, `${run}-frame`];
  const pages = await fill(msgpack, ids[0]);
  const framed = await fill(frame, ids[1]);

  const { compressors } = await msgpack.manifest();
  const decoded = {};
  for (const { compressor } of INPUTS) {
    assert.ok(Buffer.from(pages[compressor].data).equals(framed[compressor].data), `${compressor}: pages differ`);
    const { cache_format: format, page_entries: pageEntries } = compressors.find(({ name }) => name === compressor);
    const entry = ENTRIES[compressor] - 1;
    const decode = { fp8_ds_mla: decodeMla, indexer_fp8: decodeIndexer }[format];
    decoded[compressor] = { entry, ...decode(pages[compressor], pageEntries, entry) };
  }

  for (const [client, id, { handle }] of [
    [msgpack, ids[0], pages[HCA]],
    [frame, ids[1], framed[HCA]],
  ]) {
    await checkRefusals(client, id, handle);
    await checkRelease(client, id, handle);
  }
  return { rows: INPUTS.map((input) => ({ ...input, generator: "fmix32" })), decoded };
}

try {
  console.log(JSON.stringify(await main(process.argv[2])));
} catch (error) {
  console.error(error);
  process.exitCode = 1;
}
