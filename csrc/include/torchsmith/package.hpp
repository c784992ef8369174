// Load and run torchsmith packages from C++17: RAII and exceptions over <torchsmith/package.h>. No libtorch; link with -ldl.
//
//     torchsmith::Model model("model.pt2");
//     std::vector<float> x(80);
//     auto outputs = model.run({torchsmith::view(x.data(), {8, 10})});
//     const float* y = outputs[0].data<float>();
#ifndef TORCHSMITH_PACKAGE_HPP
#define TORCHSMITH_PACKAGE_HPP

#include <torchsmith/package.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torchsmith {

// What went wrong: `status` is a tsm_status, `what()` the text.
class Error : public std::runtime_error {
 public:
  Error(int32_t status, const std::string& text) : std::runtime_error(text), status(status) {}
  int32_t status;
};

template <class T> struct dtype_of;
template <> struct dtype_of<double> { static constexpr int32_t value = TSM_F64; };
template <> struct dtype_of<float> { static constexpr int32_t value = TSM_F32; };
template <> struct dtype_of<int64_t> { static constexpr int32_t value = TSM_I64; };
template <> struct dtype_of<int32_t> { static constexpr int32_t value = TSM_I32; };
template <> struct dtype_of<int16_t> { static constexpr int32_t value = TSM_I16; };
template <> struct dtype_of<int8_t> { static constexpr int32_t value = TSM_I8; };
template <> struct dtype_of<uint8_t> { static constexpr int32_t value = TSM_U8; };
template <> struct dtype_of<bool> { static constexpr int32_t value = TSM_BOOL; };

// An input: memory of the caller, not copied. Empty strides: contiguous.
struct View {
  const void* data;
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
};

template <class T> View view(const T* data, std::vector<int64_t> sizes, std::vector<int64_t> strides = {}) {
  return View{data, dtype_of<T>::value, std::move(sizes), std::move(strides)};
}

// An output: its memory lives as long as this object, and no longer than the model.
class Tensor {
 public:
  Tensor(const torchsmith_model* model, const tsm_tensor& tensor) : model_(model), tensor_(tensor) {}
  Tensor(Tensor&& other) noexcept : model_(other.model_), tensor_(std::exchange(other.tensor_, tsm_tensor{})) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(model_, other.model_);
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { torchsmith_release(model_, &tensor_); }

  bool is_none() const { return tensor_.kind != 0; }
  int32_t dtype() const { return tensor_.dtype; }
  std::vector<int64_t> sizes() const { return {tensor_.sizes, tensor_.sizes + tensor_.ndim}; }
  std::vector<int64_t> strides() const { return {tensor_.strides, tensor_.strides + tensor_.ndim}; }
  int64_t numel() const {
    int64_t n = 1;
    for (int32_t k = 0; k < tensor_.ndim; k++) n *= tensor_.sizes[k];
    return n;
  }
  const void* raw() const { return tensor_.data; }
  template <class T> const T* data() const {
    if (dtype_of<T>::value != tensor_.dtype) throw Error(TSM_ERROR_DTYPE, "the output has another dtype");
    return static_cast<const T*>(tensor_.data);
  }

 private:
  const torchsmith_model* model_;
  tsm_tensor tensor_;
};

// One model. Several threads may run it at once.
class Model {
 public:
  explicit Model(const std::string& path, const std::string& name = "model", int32_t threads = 0, bool verify = false) {
    torchsmith_options options{};
    options.size = sizeof options;
    options.threads = threads;
    options.verify = verify;
    if (int32_t status = torchsmith_load(path.c_str(), name.c_str(), &options, &model_)) throw Error(status, torchsmith_error());
  }
  Model(Model&& other) noexcept : model_(std::exchange(other.model_, nullptr)) {}
  Model& operator=(Model&& other) noexcept {
    std::swap(model_, other.model_);
    return *this;
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model() { torchsmith_free(model_); }

  std::vector<Tensor> run(const std::vector<View>& inputs) const {
    std::vector<tsm_tensor> in, out(torchsmith_output_count(model_), tsm_tensor{});
    for (const View& v : inputs) in.push_back(raw(v));
    check(torchsmith_run(model_, in.data(), in.size(), out.data(), out.size()));
    std::vector<Tensor> results;
    results.reserve(out.size());
    for (const tsm_tensor& t : out) results.emplace_back(model_, t);
    return results;
  }

  // New values for constants, by name; calls that run meanwhile see all old values or all new ones.
  void load_constants(const std::map<std::string, View>& values) {
    std::vector<const char*> names;
    std::vector<tsm_tensor> tensors;
    for (const auto& [name, value] : values) {
      names.push_back(name.c_str());
      tensors.push_back(raw(value));
    }
    check(torchsmith_load_constants(model_, names.data(), tensors.data(), names.size()));
  }

  std::vector<std::string> constant_names() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < torchsmith_constant_count(model_); i++) {
      tsm_constant_info info{};
      check(torchsmith_constant(model_, i, &info));
      names.emplace_back(info.name);
    }
    return names;
  }

  std::string info() const { return torchsmith_info(model_); }

 private:
  static tsm_tensor raw(const View& v) {
    if (!v.strides.empty() && v.strides.size() != v.sizes.size()) throw Error(TSM_ERROR_STRIDE, "as many strides as sizes are needed");
    tsm_tensor t{};
    t.data = const_cast<void*>(v.data);
    t.sizes = v.sizes.data();
    t.strides = v.strides.empty() ? nullptr : v.strides.data();
    t.ndim = static_cast<int32_t>(v.sizes.size());
    t.dtype = v.dtype;
    return t;
  }
  void check(int32_t status) const {
    if (status) throw Error(status, torchsmith_model_error(model_));
  }
  torchsmith_model* model_ = nullptr;
};

}  // namespace torchsmith
#endif
