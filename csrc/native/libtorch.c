/* libtorch's exported C functions, found by name. In: the process. Out: `libtorch`. */
#include "libtorch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

Libtorch libtorch;

#define NEED(name, field) {name, (void **)&libtorch.field, true}
#define MAY(name, field) {name, (void **)&libtorch.field, false}

static const struct {
  const char *name;
  void **where;
  bool needed;
} SYMBOLS[] = {
    NEED("aoti_torch_get_data_ptr", get_data_ptr),
    NEED("aoti_torch_get_sizes", get_sizes),
    NEED("aoti_torch_get_strides", get_strides),
    NEED("aoti_torch_get_dim", get_dim),
    NEED("aoti_torch_get_dtype", get_dtype),
    NEED("aoti_torch_get_device_type", get_device_type),
    NEED("aoti_torch_dtype_element_size", element_size),
    NEED("aoti_torch_get_storage_offset", get_storage_offset),
    NEED("aoti_torch_empty_strided", empty_strided),
    NEED("aoti_torch_create_tensor_from_blob", from_blob),
    NEED("aoti_torch__reinterpret_tensor", reinterpret),
    NEED("aoti_torch_delete_tensor_object", delete_tensor),
    NEED("aoti_torch_new_tensor_handle", new_handle),
    NEED("aoti_torch_new_uninitialized_tensor", nothing),
    NEED("aoti_torch_copy_", copy_),
    NEED("aoti_torch_grad_mode_is_enabled", grad_enabled),
    NEED("aoti_torch_grad_mode_set_enabled", set_grad),
    MAY("torch_parallel_for", parallel_for),
    MAY("torch_get_num_threads", num_threads),
    MAY("_ZN3c1013InferenceMode10is_enabledEv", inference),
    MAY("_ZN2at6native6is_negERKNS_6TensorE", is_neg),
    MAY("_ZN2at6native7is_conjERKNS_6TensorE", is_conj),
    MAY("aoti_torch_get_device_index", get_device_index),
    MAY("aoti_torch_get_current_cuda_stream", cuda_stream),
    MAY("torch_exception_get_what_without_backtrace", what),
    MAY("torch_call_dispatcher", call),
    MAY("aoti_torch_call_dispatcher", old_call),
    MAY("torch_new_list_reserve_size", list_new),
    MAY("torch_list_push_back", list_push),
    MAY("torch_new_string_handle", string_new),
    MAY("torch_new_stable_ivalue", value_new),
    MAY("_Znwm", allocate),
};

static const char *const DTYPES[TS_DTYPES] = {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
                                              "complex64", "complex128", "complex32", "uint16", "uint32", "uint64"};

static void *find_in(const char *library, const char *name) {
  void *lib = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  void *found = lib ? dlsym(lib, name) : NULL;
  if (lib) dlclose(lib); /* it was there before and stays */
  return found;
}

/* In libtorch_cpu.so and what it needs, in libtorch_cuda.so, or in the program itself. Not RTLD_GLOBAL in Python, so the libraries have
 * to be asked for. */
void *libtorch_find(const char *name) {
  void *found = find_in("libtorch_cpu.so", name);
  if (!found && strstr(name, "cuda")) found = find_in("libtorch_cuda.so", name);
  return found ? found : dlsym(RTLD_DEFAULT, name);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *connect(void) {
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
    *SYMBOLS[i].where = libtorch_find(SYMBOLS[i].name);
    if (!*SYMBOLS[i].where && SYMBOLS[i].needed) return SYMBOLS[i].name;
  }
  for (int i = 0; i < TS_DTYPES; i++) {
    char name[64];
    snprintf(name, sizeof name, "aoti_torch_dtype_%s", DTYPES[i]);
    int32_t (*number)(void) = (int32_t(*)(void))libtorch_find(name);
    libtorch.dtypes[i] = number ? number() : -1;
  }
  int32_t (*cpu)(void) = (int32_t(*)(void))libtorch_find("aoti_torch_device_type_cpu");
  libtorch.cpu = cpu ? cpu() : 0;
  int32_t (*cuda)(void) = (int32_t(*)(void))libtorch_find("aoti_torch_device_type_cuda");
  libtorch.cuda = cuda ? cuda() : -1;
  libtorch.ready = true;
  return NULL;
}

const char *libtorch_connect(void) {
  pthread_mutex_lock(&lock);
  const char *missing = libtorch.ready ? NULL : connect();
  pthread_mutex_unlock(&lock);
  return missing;
}

int describe_sizes(Handle h, ts_tensor *out) {
  int64_t *sizes = NULL, *strides = NULL;
  out->handle = h;
  out->data = NULL;
  if (libtorch.get_sizes(h, &sizes) || libtorch.get_strides(h, &strides)) return -1;
  out->sizes = sizes;
  out->strides = strides;
  return 0;
}

int describe_tensor(Handle h, ts_tensor *out, bool with_sizes, int32_t wanted) {
  int32_t device = -1;
  out->sizes = out->strides = NULL;
  if (libtorch.get_device_type(h, &device) || device != wanted) return -1; /* its address is none of ours */
  if (with_sizes && describe_sizes(h, out)) return -1;
  out->handle = h;
  return libtorch.get_data_ptr(h, &out->data) ? -1 : 0;
}
