void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  const f32a *b1 = (const f32a *)bufs[1];
  for (i64 i0 = lo; i0 < hi; i0++) {
    i64 v1 = (i0 * 4125);
    i64 v5 = (i0 * 33);
    for (i64 i1 = 0; i1 < 32; i1 += 16) {
      xf32 a0 = ((f32)(0x0.0p+0f) - (xf32){0});
      for (i64 i2 = 0; i2 < 125; i2++) {
        i64 v2 = (i2 * 33);
        i64 v3 = (v1 + v2);
        xf32 v0 = *(const xf32u *)(b1 + v3 + i1);
        xf32 v4 = (a0 + v0);
        a0 = v4;
      }
      *(xf32u *)(b0 + v5 + i1) = a0;
    }
    { i64 i1 = 32;
      xf32 a1 = ((f32)(0x0.0p+0f) - (xf32){0});
      for (i64 i3 = 0; i3 < 125; i3++) {
        i64 v7 = (i3 * 33);
        i64 v8 = (v1 + v7);
        xf32 v6 = ldn_xf32(b1 + v8 + i1, 1);
        xf32 v9 = (a1 + v6);
        a1 = v9;
      }
      stn_xf32(b0 + v5 + i1, a1, 1);
    }
  }
}

void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  const f32a *b1 = (const f32a *)bufs[1];
  for (i64 g = lo; g < hi; g++) {
    for (i64 i0 = 0; i0 < 32; i0 += 16) {
      xf32 a0 = ((f32)(0x0.0p+0f) - (xf32){0});
      for (i64 i1 = 0; i1 < 40; i1++) {
        i64 v1 = (i1 * 33);
        xf32 v0 = *(const xf32u *)(b1 + v1 + i0);
        xf32 v2 = (a0 + v0);
        a0 = v2;
      }
      *(xf32u *)(b0 + i0) = a0;
    }
    { i64 i0 = 32;
      xf32 a1 = ((f32)(0x0.0p+0f) - (xf32){0});
      for (i64 i2 = 0; i2 < 40; i2++) {
        i64 v4 = (i2 * 33);
        xf32 v3 = ldn_xf32(b1 + v4 + i0, 1);
        xf32 v5 = (a1 + v3);
        a1 = v5;
      }
      stn_xf32(b0 + i0, a1, 1);
    }
  }
}
