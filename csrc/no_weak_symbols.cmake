# Fails if an object file defines a weak symbol. The linker keeps one copy of those from all units,
# and it could be the one with instructions that the processor lacks.
# cmake -D NM=nm -D OBJECT=unit.o [-D STAMP=file] -P no_weak_symbols.cmake
execute_process(COMMAND "${NM}" --defined-only --demangle "${OBJECT}"
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* [WwVvu] [^\n]*" weak "${symbols}")
if(weak)
  string(REPLACE ";" "\n" weak "${weak}")
  message(FATAL_ERROR "${OBJECT} defines weak symbols:\n${weak}")
endif()
if(STAMP)
  file(TOUCH "${STAMP}")
endif()
