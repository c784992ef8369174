/* Whether this processor, and its operating system, offer the instructions that a model was compiled for. */
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "model.h"

#if defined(__x86_64__)
enum { LEAF1_ECX, LEAF7_EBX, LEAF7_ECX, LEAF7_EDX, LEAF71_EAX, EXT1_ECX, N_WORDS };

/* One row per feature: its name in /proc/cpuinfo, where CPUID shows it, and the register state it needs. */
static const struct { const char *name; int word, bit, state; } FEATURES[] = {
    {"sse4_2", LEAF1_ECX, 20, 0},      {"avx", LEAF1_ECX, 28, 0x6},       {"fma", LEAF1_ECX, 12, 0x6},         {"f16c", LEAF1_ECX, 29, 0x6},
    {"popcnt", LEAF1_ECX, 23, 0},      {"avx2", LEAF7_EBX, 5, 0x6},       {"bmi1", LEAF7_EBX, 3, 0},           {"bmi2", LEAF7_EBX, 8, 0},
    {"lzcnt", EXT1_ECX, 5, 0},         {"avx512f", LEAF7_EBX, 16, 0xe6},  {"avx512bw", LEAF7_EBX, 30, 0xe6},   {"avx512dq", LEAF7_EBX, 17, 0xe6},
    {"avx512vl", LEAF7_EBX, 31, 0xe6}, {"avx512cd", LEAF7_EBX, 28, 0xe6}, {"avx512_vnni", LEAF7_ECX, 11, 0xe6}, {"avx512_bf16", LEAF71_EAX, 5, 0xe6},
    {"avx512_fp16", LEAF7_EDX, 23, 0xe6}, {"amx_tile", LEAF7_EDX, 24, 0x60000}, {"amx_bf16", LEAF7_EDX, 22, 0x60000}, {"amx_int8", LEAF7_EDX, 25, 0x60000},
};

static void cpuid(uint32_t leaf, uint32_t sub, uint32_t *out) {
  __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(sub));
}

static uint64_t read_words(uint32_t *words) {
  uint32_t r[4], most, sub;
  memset(words, 0, sizeof(uint32_t) * N_WORDS);
  cpuid(0, 0, r);
  most = r[0];
  cpuid(1, 0, r);
  words[LEAF1_ECX] = r[2];
  bool has_state = (r[2] >> 27 & 1) != 0;
  if (most >= 7) {
    cpuid(7, 0, r);
    sub = r[0];
    words[LEAF7_EBX] = r[1];
    words[LEAF7_ECX] = r[2];
    words[LEAF7_EDX] = r[3];
    if (sub >= 1) {
      cpuid(7, 1, r);
      words[LEAF71_EAX] = r[0];
    }
  }
  cpuid(0x80000001u, 0, r);
  words[EXT1_ECX] = r[2];
  uint32_t lo = 0, hi = 0;
  if (has_state) __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t)hi << 32 | lo;
}

static bool has(const char *name, size_t length, const uint32_t *words, uint64_t state) {
  for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
    if (strlen(FEATURES[i].name) == length && !memcmp(FEATURES[i].name, name, length))
      return (words[FEATURES[i].word] >> FEATURES[i].bit & 1) && (state & (uint64_t)FEATURES[i].state) == (uint64_t)FEATURES[i].state;
  return false;
}

/* Linux lets a process use the tile registers only after it asked for them. */
static bool may_use_tiles(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;
#endif
}

int32_t ts_check_cpu(const char *needed) {
  uint32_t words[N_WORDS];
  uint64_t state = read_words(words);
  char missing[256] = "";
  size_t used = 0;
  for (const char *at = needed; *at;) {
    size_t n = strcspn(at, " ");
    if (n && !has(at, n, words, state) && used + n + 2 < sizeof missing) {
      missing[used++] = ' ';
      memcpy(missing + used, at, n);
      missing[used += n] = 0;
    }
    at += n + (at[n] == ' ');
  }
  if (!used && strstr(needed, "amx") && !may_use_tiles()) return ts_fail(TSM_ERROR_CPU, "the operating system does not allow the use of AMX, which the model was compiled for");
  if (!used) return TSM_OK;
  return ts_fail(TSM_ERROR_CPU, "this processor lacks%s, which the model was compiled for; compile it with options={'cpu': 'x86-64-v3'} or for this machine", missing);
}
#else
int32_t ts_check_cpu(const char *needed) {
  return *needed ? ts_fail(TSM_ERROR_CPU, "the model was compiled for another kind of processor (%s)", needed) : TSM_OK;
}
#endif
