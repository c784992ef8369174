void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  const f32a *b1 = (const f32a *)bufs[1];
  f32a t0[33] __attribute__((aligned(64)));
  for (i64 i0 = lo; i0 < hi; i0++) {
    for (i64 i1 = 0; i1 < 32; i1 += 16) {
      *(xf32u *)(t0 + i1) = ((f32)(0x0.0p+0f) - (xf32){0});
    }
    { i64 i1 = 32;
      stn_xf32(t0 + i1, ((f32)(0x0.0p+0f) - (xf32){0}), 1);
    }
    i64 v2 = (i0 * 4125);
    for (i64 i2 = 0; i2 < 125; i2++) {
      i64 v3 = (i2 * 33);
      i64 v4 = (v2 + v3);
      for (i64 i3 = 0; i3 < 32; i3 += 16) {
        xf32 v0 = *(const xf32u *)(t0 + i3);
        xf32 v1 = *(const xf32u *)(b1 + v4 + i3);
        xf32 v5 = (v0 + v1);
        *(xf32u *)(t0 + i3) = v5;
      }
      { i64 i3 = 32;
        xf32 v6 = ldn_xf32(t0 + i3, 1);
        xf32 v7 = ldn_xf32(b1 + v4 + i3, 1);
        xf32 v8 = (v6 + v7);
        stn_xf32(t0 + i3, v8, 1);
      }
    }
    i64 v10 = (i0 * 33);
    for (i64 i4 = 0; i4 < 32; i4 += 16) {
      xf32 v9 = *(const xf32u *)(t0 + i4);
      *(xf32u *)(b0 + v10 + i4) = v9;
    }
    { i64 i4 = 32;
      xf32 v11 = ldn_xf32(t0 + i4, 1);
      stn_xf32(b0 + v10 + i4, v11, 1);
    }
  }
}

void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  const f32a *b1 = (const f32a *)bufs[1];
  f32a t0[33] __attribute__((aligned(64)));
  for (i64 g = lo; g < hi; g++) {
    for (i64 i0 = 0; i0 < 32; i0 += 16) {
      *(xf32u *)(t0 + i0) = ((f32)(0x0.0p+0f) - (xf32){0});
    }
    { i64 i0 = 32;
      stn_xf32(t0 + i0, ((f32)(0x0.0p+0f) - (xf32){0}), 1);
    }
    for (i64 i1 = 0; i1 < 40; i1++) {
      i64 v2 = (i1 * 33);
      for (i64 i2 = 0; i2 < 32; i2 += 16) {
        xf32 v0 = *(const xf32u *)(t0 + i2);
        xf32 v1 = *(const xf32u *)(b1 + v2 + i2);
        xf32 v3 = (v0 + v1);
        *(xf32u *)(t0 + i2) = v3;
      }
      { i64 i2 = 32;
        xf32 v4 = ldn_xf32(t0 + i2, 1);
        xf32 v5 = ldn_xf32(b1 + v2 + i2, 1);
        xf32 v6 = (v4 + v5);
        stn_xf32(t0 + i2, v6, 1);
      }
    }
    for (i64 i3 = 0; i3 < 32; i3 += 16) {
      xf32 v7 = *(const xf32u *)(t0 + i3);
      *(xf32u *)(b0 + i3) = v7;
    }
    { i64 i3 = 32;
      xf32 v8 = ldn_xf32(t0 + i3, 1);
      stn_xf32(b0 + i3, v8, 1);
    }
  }
}
