"""AMX tiles in software: the text of a kernel for them, run on processors that have none."""

from __future__ import annotations

import re

# configuration, eight tiles, and the six instructions; a product of tiles that do not fit each other traps, as it does in hardware
_TILES = r"""#undef __AMX_BF16__
#define __AMX_BF16__ 1
static __thread unsigned char tile_shape[64], tiles[8][16][64];
static int tile_rows(int t) { return tile_shape[48 + t]; }
static int tile_bytes(int t) { return tile_shape[16 + 2 * t] + 256 * tile_shape[17 + 2 * t]; }
static void tile_config(const void *p) { __builtin_memcpy(tile_shape, p, 64); __builtin_memset(tiles, 0, sizeof tiles); }
static void tile_zero(int t) { __builtin_memset(tiles[t], 0, 1024); }
static void tile_load(int t, const void *p, long long step) {
  tile_zero(t);
  for (int r = 0; r < tile_rows(t); r++) __builtin_memcpy(tiles[t][r], (const char *)p + r * step, tile_bytes(t));
}
static void tile_store(int t, void *p, long long step) {
  for (int r = 0; r < tile_rows(t); r++) __builtin_memcpy((char *)p + r * step, tiles[t][r], tile_bytes(t));
}
static float tile_value(const unsigned char *row, int i) {
  unsigned u = row[2 * i] * 65536u + row[2 * i + 1] * 16777216u;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
static void tile_product(int d, int a, int b) {
  if (tile_rows(a) != tile_rows(d) || tile_bytes(b) != tile_bytes(d) || tile_bytes(a) != 4 * tile_rows(b)) __builtin_trap();
  for (int m = 0; m < tile_rows(d); m++) for (int n = 0; n < tile_bytes(d) / 4; n++) {
    float s; __builtin_memcpy(&s, tiles[d][m] + 4 * n, 4);
    for (int k = 0; k < tile_rows(b); k++) for (int h = 0; h < 2; h++)
      s += tile_value(tiles[a][m], 2 * k + h) * tile_value(tiles[b][k], 2 * n + h);
    __builtin_memcpy(tiles[d][m] + 4 * n, &s, 4);
  }
}
"""
_INSTRUCTIONS = (
    (r'__asm__ volatile\("ldtilecfg \(%0\)" : : "r"\((\w+)\) : "memory"\);', r"tile_config(\1);"),
    (r'long r; __asm__ volatile\("syscall".*?\);', "long r = 0;"),
    (r'__asm__ volatile\("tilerelease" : : : "memory"\)', "(void)0"),
    (r'__asm__ volatile\("tilezero %%tmm(\d)" : : : "memory"\);', r"tile_zero(\1);"),
    (r'__asm__ volatile\("tileloadd \(%0,%1,1\), %%tmm(\d)" : : "r"\((.*)\), "r"\((\w+)\) : "memory"\);', r"tile_load(\1, \2, \3);"),
    (r'__asm__ volatile\("tilestored %%tmm(\d), \(%0,%1,1\)" : : "r"\((.*)\), "r"\(\(i64\)(\d+)\) : "memory"\);',
     r"tile_store(\1, \2, \3);"),
    (r'__asm__ volatile\("tdpbf16ps %%tmm(\d), %%tmm(\d), %%tmm(\d)" : : : "memory"\);', r"tile_product(\3, \2, \1);"),
)  # fmt: skip


def in_software(text: str) -> str:
    """The text of a kernel with calls of functions in place of the instructions."""
    if "tileloadd" not in text:
        return text
    for instruction, call in _INSTRUCTIONS:
        text = re.sub(instruction, call, text)
    assert not re.search(r"asm[^;]*tile", text)
    return _TILES + text
