void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  const f32a *b1 = (const f32a *)bufs[1];
  for (i64 i0 = lo; i0 < hi; i0++) {
    i64 v0 = (i0 * (-304));
    i64 v1 = (v0 + 1003);
    i64 v2 = sel_i64((v1 < 304), v1, 304);
    i64 e0 = v2 & -16;
    i64 v4 = (i0 * 304);
    for (i64 i1 = 0; i1 < e0; i1 += 16) {
      xf32 v3 = *(const xf32u *)(b1 + v4 + i1);
      xf32 v5 = cos_xf32(v3);
      xf32 v6 = sin_xf32(v5);
      xf32 v7 = (v5 * ((f32)(0x1.0000000000000p+1f) - (xf32){0}));
      xf32 v8 = (v6 + v7);
      *(xf32u *)(b0 + v4 + i1) = v8;
    }
    int n0 = (int)(v2 - e0);
    if (n0) { i64 i1 = e0;
      xf32 v9 = ldn_xf32(b1 + v4 + i1, n0);
      xf32 v10 = cos_xf32(v9);
      xf32 v11 = sin_xf32(v10);
      xf32 v12 = (v10 * ((f32)(0x1.0000000000000p+1f) - (xf32){0}));
      xf32 v13 = (v11 + v12);
      stn_xf32(b0 + v4 + i1, v13, n0);
    }
  }
}
