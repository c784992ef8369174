void TS_KERNEL(void *const *bufs, const i64 *syms, i64 lo, i64 hi) {
  (void)syms;
  f32a *b0 = (f32a *)bufs[0];
  f32a *b1 = (f32a *)bufs[1];
  const f32a *b2 = (const f32a *)bufs[2];
  const f32a *b3 = (const f32a *)bufs[3];
  const f32a *b4 = (const f32a *)bufs[4];
  for (i64 i0 = lo; i0 < hi; i0++) {
    i64 v1 = (i0 * 100);
    for (i64 i1 = 0; i1 < 96; i1 += 16) {
      xf32 v0 = *(const xf32u *)(b2 + v1 + i1);
      xf32 v2 = *(const xf32u *)(b3 + v1 + i1);
      xf32 v3 = (v0 + v2);
      *(xf32u *)(b0 + v1 + i1) = v3;
    }
    { i64 i1 = 96;
      xf32 v4 = ldn_xf32(b2 + v1 + i1, 4);
      xf32 v5 = ldn_xf32(b3 + v1 + i1, 4);
      xf32 v6 = (v4 + v5);
      stn_xf32(b0 + v1 + i1, v6, 4);
    }
    xf32 a0[3] = {((f32)(0x0.0p+0f) - (xf32){0}), ((f32)(0x0.0p+0f) - (xf32){0}), ((f32)(0x0.0p+0f) - (xf32){0})};
    for (i64 i3 = 0; i3 < 96; i3 += 48) {
      _Pragma("GCC unroll 4")
      for (int u0 = 0; u0 < 3; u0++) { i64 i2 = i3 + u0 * 16;
        xf32 v7 = *(const xf32u *)(b0 + v1 + i2);
        xf32 v8 = (a0[u0] + v7);
        a0[u0] = v8;
      }
    }
    { i64 i2 = 96;
      xf32 v9 = ldn_xf32(b0 + v1 + i2, 4);
      xf32 v10 = (a0[0] + v9);
      a0[0] = sel_xf32(((xi32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} < 4), v10, a0[0]);
    }
    xf32 a1 = a0[0];
    {
      xf32 v11 = a0[1];
      xf32 v12 = (a1 + v11);
      a1 = v12;
    }
    {
      xf32 v13 = a0[2];
      xf32 v14 = (a1 + v13);
      a1 = v14;
    }
    {
      xf32 v15 = __builtin_shufflevector(a1, a1, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
      xf32 v16 = (a1 + v15);
      a1 = v16;
    }
    {
      xf32 v17 = __builtin_shufflevector(a1, a1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3);
      xf32 v18 = (a1 + v17);
      a1 = v18;
    }
    {
      xf32 v19 = __builtin_shufflevector(a1, a1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1);
      xf32 v20 = (a1 + v19);
      a1 = v20;
    }
    {
      xf32 v21 = __builtin_shufflevector(a1, a1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0);
      xf32 v22 = (a1 + v21);
      a1 = v22;
    }
    f32 a2 = a1[0];
    f32 v23 = (a2 / 0x1.9000000000000p+6f);
    xf32 a3[3] = {((f32)(0x0.0p+0f) - (xf32){0}), ((f32)(0x0.0p+0f) - (xf32){0}), ((f32)(0x0.0p+0f) - (xf32){0})};
    for (i64 i5 = 0; i5 < 96; i5 += 48) {
      _Pragma("GCC unroll 4")
      for (int u1 = 0; u1 < 3; u1++) { i64 i4 = i5 + u1 * 16;
        xf32 v24 = *(const xf32u *)(b0 + v1 + i4);
        xf32 v25 = (v24 - ((f32)(v23) - (xf32){0}));
        xf32 v26 = (v25 * v25);
        xf32 v27 = (a3[u1] + v26);
        a3[u1] = v27;
      }
    }
    { i64 i4 = 96;
      xf32 v28 = ldn_xf32(b0 + v1 + i4, 4);
      xf32 v29 = (v28 - ((f32)(v23) - (xf32){0}));
      xf32 v30 = (v29 * v29);
      xf32 v31 = (a3[0] + v30);
      a3[0] = sel_xf32(((xi32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} < 4), v31, a3[0]);
    }
    xf32 a4 = a3[0];
    {
      xf32 v32 = a3[1];
      xf32 v33 = (a4 + v32);
      a4 = v33;
    }
    {
      xf32 v34 = a3[2];
      xf32 v35 = (a4 + v34);
      a4 = v35;
    }
    {
      xf32 v36 = __builtin_shufflevector(a4, a4, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
      xf32 v37 = (a4 + v36);
      a4 = v37;
    }
    {
      xf32 v38 = __builtin_shufflevector(a4, a4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3);
      xf32 v39 = (a4 + v38);
      a4 = v39;
    }
    {
      xf32 v40 = __builtin_shufflevector(a4, a4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1);
      xf32 v41 = (a4 + v40);
      a4 = v41;
    }
    {
      xf32 v42 = __builtin_shufflevector(a4, a4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0);
      xf32 v43 = (a4 + v42);
      a4 = v43;
    }
    f32 a5 = a4[0];
    f32 v46 = (a5 + 0x1.0000000000000p+0f);
    f32 v47 = rsqrt_f32(v46);
    for (i64 i6 = 0; i6 < 96; i6 += 16) {
      xf32 v44 = *(const xf32u *)(b0 + v1 + i6);
      xf32 v45 = (v44 - ((f32)(v23) - (xf32){0}));
      xf32 v48 = (v45 * ((f32)(v47) - (xf32){0}));
      xf32 v49 = *(const xf32u *)(b4 + i6);
      xf32 v50 = (v48 * v49);
      *(xf32u *)(b1 + v1 + i6) = v50;
    }
    { i64 i6 = 96;
      xf32 v51 = ldn_xf32(b0 + v1 + i6, 4);
      xf32 v52 = (v51 - ((f32)(v23) - (xf32){0}));
      xf32 v53 = (v52 * ((f32)(v47) - (xf32){0}));
      xf32 v54 = ldn_xf32(b4 + i6, 4);
      xf32 v55 = (v53 * v54);
      stn_xf32(b1 + v1 + i6, v55, 4);
    }
  }
}
