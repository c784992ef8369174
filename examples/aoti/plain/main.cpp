// The same in C++17.
#include <iostream>
#include <torchsmith/package.hpp>

int main(int argc, char** argv) {
  try {
    torchsmith::Model model(argc > 1 ? argv[1] : "model.pt2");
    std::vector<float> x(80);
    for (int i = 0; i < 80; i++) x[i] = 0.01f * static_cast<float>(i);
    for (int64_t batch : {8, 1}) {
      auto outputs = model.run({torchsmith::view(x.data(), {batch, 10})});
      std::cout << "Result for a batch of " << batch << ":\n";
      for (int64_t i = 0; i < outputs[0].numel(); i++) std::cout << outputs[0].data<float>()[i] << "\n";
    }
    model.run({torchsmith::view(x.data(), {8, 9})});
  } catch (const torchsmith::Error& e) {
    std::cout << "A wrong size is an error with code " << e.status << ": " << e.what() << "\n";
    return e.status == TSM_ERROR_SIZE ? 0 : 1;
  }
}
