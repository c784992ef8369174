/* The Python types of packages; <torchsmith/package.h> does the loading. */
#ifndef TORCHSMITH_NATIVE_PACKAGE_H
#define TORCHSMITH_NATIVE_PACKAGE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "include/torchsmith/package.h"

extern PyTypeObject PackageType;
int package_ready(void);
PyObject *package_setup(PyObject *module, PyObject *error_type);
#endif
